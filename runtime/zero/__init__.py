"""ZeRO as a table: units of flat buffers, and where each of their parts lives."""
