"""Starting one job of several processes, on one machine or on several: hosts, the agent of a node, its workers."""
