from active_backend import cpu_ref as cpu_ref
