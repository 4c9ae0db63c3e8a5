"""Starts a job of several processes on one or several machines: hosts, the agent of a node, its workers."""
