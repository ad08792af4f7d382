"""Test that no ZeRO-3 rank ever holds more than one block unpartitioned."""

import pytest
from rank_processes import Case, tiny_config, tiny_plan, train_cases

from trainctl.config.schema import DataType
from trainctl.runs.layout import RunPaths


@pytest.mark.slow
def test_building_grows_a_rank_by_its_shard_and_not_by_the_model(tmp_path):
    config = tiny_config(steps=1)
    config.zero_stage.stage = 3
    config.precision.compute = DataType.fp32
    config.model.hidden_size, config.model.intermediate_size = 1024, 2816
    config.model.num_attention_heads, config.model.num_key_value_heads = 8, 8
    config.model.num_layers = 16  # 822 MB, of which each of two ranks keeps half
    case = Case(tiny_plan(config, 2), RunPaths(tmp_path))
    for rank in train_cases(2, [case], probe="memory_probe:growth"):
        assert rank["shard"] > 7 * rank["block"], "too small a model to tell"
        assert rank["growth"] < 2 * rank["shard"] + rank["block"]
        # Stricter than promised: the shard, one block in flight, and a little for the rest.
        assert rank["growth"] < 1.15 * rank["shard"] + 2 * rank["block"]
