from pathlib import Path

import pytest
import torch
from tiny import llama, qwen3
from transformers import MistralConfig, MistralForCausalLM

from condensegrpo.core.errors import ConfigError
from condensegrpo.learner.logprobs import CPU, TrainedLogprobs
from condensegrpo.learner.model_folder import check_heads
from condensegrpo.learner.ranks import join
from condensegrpo.learner.sequence_parallel import RankGroup


def test_trained_tokens_are_predicted_where_their_context_lies() -> None:
    """Five tokens and one of padding on three ranks; the last predicts nothing."""
    token_ids, source = torch.tensor([[7, 8, 9, 10, 11]]), torch.tensor([0, 1, 3, 1, 2])
    groups = [RankGroup(3, place, None) for place in range(3)]
    assert [group.part(group.padded(token_ids, CPU)).tolist() for group in groups] == [[[7, 8]], [[9, 10]], [[11, 0]]]
    assert [group.predicted_here(6, source).tolist() for group in groups] == [[0, 1, 3], [2, 4], []]


def test_ranks_that_do_not_divide_into_groups_are_refused() -> None:
    join()
    module = TrainedLogprobs(llama())
    with pytest.raises(
        ConfigError, match=r"sequence_parallel: found 2, .* number of ranks, 1. Start a multiple of 2 processes"
    ):
        module.share_rows(2)


def test_a_model_of_plain_rows_is_refused() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    policy = MistralForCausalLM(MistralConfig(vocab_size=32, sliding_window=4, num_key_value_heads=2, **sizes))
    with pytest.raises(ConfigError, match=r"prefix trees, and this model has none: its sliding_window is 4"):
        TrainedLogprobs(policy).share_rows(2)


@pytest.mark.parametrize(("ranks", "able"), [(2, True), (4, False), (3, False), (1, True)])
def test_attention_heads_must_divide_over_the_ranks(tmp_path: Path, ranks: int, able: bool) -> None:
    """Two heads, one of keys: it goes to both ranks."""
    qwen3().save_pretrained(tmp_path)
    if able:
        check_heads(str(tmp_path), ranks)
        return
    with pytest.raises(
        ConfigError, match=rf"found {ranks}, and .* 2 attention heads and 1 key heads.* Set one of 1, 2\."
    ):
        check_heads(str(tmp_path), ranks)
