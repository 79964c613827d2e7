"""A program's first steps without values: where every tensor lies and for how long, and what it costs."""
