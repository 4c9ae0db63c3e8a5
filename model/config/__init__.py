"""The schema of a run's options, their sources (command line, YAML, other systems' files, environment) and checks."""
