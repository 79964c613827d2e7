"""The processes that the launcher starts on a host: keeper, agent, and the relay on a gateway."""
