"""`make npu`: what a machine with Ascend devices confirms or refutes of what HAL claims."""
