"""What devices and machines are: peaks with their sources, links, memory, power, environment."""
