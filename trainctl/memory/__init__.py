"""Memory budget: what a plan needs on device, host, NVMe and disk. Pure arithmetic."""
