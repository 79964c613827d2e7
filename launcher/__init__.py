"""From a command line to running workers on many hosts, and back to one verdict. No torch."""
