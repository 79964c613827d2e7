"""Files, processes, addresses and limits of a host, without the slow modules of the standard library."""
