"""Engine that runs torch's `fully_shard` (FSDP2), without DeepSpeed."""
