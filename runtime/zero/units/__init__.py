"""Units: a model cut into parts that are gathered, reduced and stepped together."""
