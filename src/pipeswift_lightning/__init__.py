"""Pipeline parallelism for PyTorch Lightning."""
