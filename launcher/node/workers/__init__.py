"""Workers of one host: prepared, started, watched and ended."""
