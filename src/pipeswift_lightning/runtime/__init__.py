"""Execute plans: torch and torch.distributed, no Lightning."""
