"""Metal kernels of lily_mlx, and the host tool that compiles them off Apple (metal.host)."""
