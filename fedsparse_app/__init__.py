"""The Flower App and the command line: the only place with run config, disk and processes."""
