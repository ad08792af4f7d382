"""torch's `fully_shard` (FSDP2) as the engine, without DeepSpeed."""
