"""The one schema of a run, its sources (command line, YAML, other systems' files, environment) and its checks."""
