"""Log-probabilities of the trained tokens of packed rows, without a [tokens × vocabulary] tensor.

    rows, packed ─▶ decoder ─▶ hidden (T, H) of the trained positions ─▶ LM head, chunk by chunk ─▶ log π (T,)

Legend: S tokens of a packed micro-batch, R rows in it, L tokens of its longest row, T trained tokens, H hidden size,
V vocabulary.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from condensegrpo.errors import LearnerError
from condensegrpo.packing import PackedBatch

CHUNK_LOGITS = 2**25  # logits that exist at a time: 128 MB in fp32
DENSE_ATTENTION = ("sdpa", "eager")  # these compute every pair of a row's tokens, masked or not


class ChunkedHead(nn.Module):
    """The LM head on some positions: hidden states in, log-probabilities of given tokens out.

    Its chunks are recomputed in backward. ZeRO-3 treats it as one leaf: the weight is gathered once, however many
    chunks a rank has, so that ranks with different numbers of trained tokens stay in step.
    """

    def __init__(self, lm_head: nn.Module, *, softcap: float | None, vocabulary: int) -> None:
        super().__init__()
        self.lm_head = lm_head
        self.softcap = softcap
        self.chunk_tokens = max(1, CHUNK_LOGITS // vocabulary)

    def forward(self, hidden: Tensor, target: Tensor, temperature: float) -> Tensor:
        """Log-probability of ``target`` (T,) after ``hidden`` (T, H), nats at ``temperature``: fp32 (T,)."""
        if len(target) <= self.chunk_tokens:
            return self._chunk(hidden, target, temperature)
        chunks = zip(torch.split(hidden, self.chunk_tokens), torch.split(target, self.chunk_tokens), strict=True)
        return torch.cat(
            [
                cast(Tensor, checkpoint(self._chunk, hidden_t, target_t, temperature, use_reentrant=False))
                for hidden_t, target_t in chunks
            ]
        )

    def _chunk(self, hidden: Tensor, target: Tensor, temperature: float) -> Tensor:
        logits = self.logits(hidden) / temperature
        return -functional.cross_entropy(logits, target, reduction="none")

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (…, V) in fp32 after ``hidden`` (…, H), soft-capped where the model's configuration says so."""
        logits = cast(Tensor, self.lm_head(hidden)).float()
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


class TrainedLogprobs(nn.Module):
    """A causal LM whose forward pass gives log-probabilities of trained tokens; what DeepSpeed wraps.

    ``policy`` is the model itself; ``head`` shares its LM head.
    """

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        self.policy = policy
        self.decoder = (policy.get_decoder(),)  # in a tuple, so that its parameters are not registered twice
        config = policy.config.get_text_config()  # its attributes know other names, such as GPT-2's n_embd
        settings: dict[str, Any] = config.to_dict()
        self.dense_width = config.hidden_size if policy.config._attn_implementation in DENSE_ATTENTION else None
        self.head = ChunkedHead(
            policy.get_output_embeddings(),
            softcap=settings.get("final_logit_softcapping"),
            vocabulary=config.vocab_size,
        )

    def forward(
        self, token_ids: Tensor, position_ids: Tensor, source: Tensor, target: Tensor, temperature: float
    ) -> Tensor:
        """Log π of ``target`` (T,) predicted at ``source`` (T,) of the packed ``token_ids`` (1, S): fp32 (T,), nats."""
        hidden = self._hidden(token_ids, position_ids, source)
        return cast(Tensor, self.head(hidden, target, temperature))

    @property
    def config(self) -> PretrainedConfig:
        """The policy's configuration."""
        return self.policy.config

    def _hidden(self, token_ids: Tensor, position_ids: Tensor, source: Tensor) -> Tensor:
        """The decoder's last hidden states (T, H) at ``source``; no row sees another."""
        rows, longest = int((position_ids == 0).sum()), int(position_ids.max()) + 1
        if self.dense_width is None or not side_by_side(rows, longest, position_ids.numel(), self.dense_width):
            return self._decode(token_ids, position_ids)[0].index_select(0, source)
        place_S, row_S = position_ids[0], (position_ids[0] == 0).cumsum(dim=0) - 1
        padded_RL = token_ids.new_zeros(rows, longest).index_put((row_S, place_S), token_ids[0])
        position_RL = torch.arange(longest, device=token_ids.device).expand(rows, longest)
        return self._decode(padded_RL, position_RL)[row_S[source], place_S[source]]

    def _decode(self, token_ids: Tensor, position_ids: Tensor) -> Tensor:
        # Restarting positions make attention block-diagonal only without a cache: with one, rows see each other.
        output = self.decoder[0](input_ids=token_ids, position_ids=position_ids, attention_mask=None, use_cache=False)
        return cast(Tensor, output.last_hidden_state)

    @torch.no_grad()
    def check(self) -> None:
        """Compare the model's own logits with those of the head alone.

        Raises:
            LearnerError: the model does more to its logits than its LM head and a final softcap.
        """
        attention = self.policy.config._attn_implementation
        if attention not in DENSE_ATTENTION:  # flash attention runs on GPUs only, where the policy is not yet
            self.policy.set_attn_implementation("eager")
        device = next(self.policy.parameters()).device
        position_ids = torch.arange(4, device=device)[None]
        token_ids = position_ids % self.policy.get_input_embeddings().num_embeddings
        wanted = self.policy(input_ids=token_ids, position_ids=position_ids, use_cache=False).logits.float()
        found = self.head.logits(self._decode(token_ids, position_ids))
        self.policy.set_attn_implementation(attention)
        if not torch.allclose(found, wanted, rtol=1e-2, atol=1e-2):
            raise LearnerError(
                f"applying the LM head of {type(self.policy).__name__} to trained positions only: its own logits "
                f"differ from those of decoder and head by up to {(found - wanted).abs().max():.3g}, so it does "
                f"something more to them. Wanted is a model without that, such as Qwen3 or Llama, or support for it in "
                f"condensegrpo/learner/logprobs.py."
            )


def side_by_side(rows: int, longest: int, tokens: int, width: int) -> bool:
    """Whether rows cost less side by side, padded on the right, than behind each other in one long row.

    Cost of t tokens that each attend to c, in a model of hidden size H: t·(6H + c), linear layers and attention.
    Padding is never seen: it lies after the tokens of its row. Flash attention skips other rows by itself.

    Example: 64 rows of 30 tokens, H = 64: 1920·(384 + 30) side by side, 1920·(384 + 1920) in one row.
    """
    padded = rows * longest
    return rows > 1 and padded * (6 * width + longest) < tokens * (6 * width + tokens)


def trained_logprobs(model: PreTrainedModel, batch: PackedBatch, *, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of a packed batch's trained tokens under a model that no engine holds.

    log π(target_t | the tokens of its own row before it), nats, at ``temperature``.

        rows  [5 6 7]  [8 9]      trained: 7 and 9
        token_ids 5 6 7 8 9   position_ids 0 1 2 0 1   source 1 3   target 7 9   ->   log π(7|5 6), log π(9|8)

    Returns:
        fp32 (T,), in the order of ``batch.target``, with gradient.
    """
    logp_T = TrainedLogprobs(model)(batch.token_ids, batch.position_ids, batch.source, batch.target, temperature)
    return cast(Tensor, logp_T)
