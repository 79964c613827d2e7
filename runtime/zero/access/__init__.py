"""The gathers of units: when a module, a program or autograd needs parameters that are not here."""
