"""Stand-ins that let TorchTitan train on CPUs without data, tokenizer files or GPU-only attention.

Every one is an ordinary `--override.imports` target: it is chosen by configuration, shows in the configuration, and
counts in the workload. Nothing of TorchTitan is patched.

`flex_to_sdpa` and `varlen_to_sdpa` change the meaning of a model (plain causal attention instead of a document mask
or a sliding window), `adamw` that of its training; whoever uses them is told so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.optimizer import OptimizersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config.override import derive, override
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention, VarlenAttention

MULTIMODAL = "MMDataLoader.Config"
"""The loader of text with images and videos; its module needs torchvision, so it is known by name."""


class SyntheticDataLoader(BaseDataLoader):
    """Random tokens, equal for equal (data-parallel rank, batch number).

    Endless, unless `batches` says after how many it ends; with `last` one more batch of so many sequences follows.
    Yields ({"input": int64 [batch, seq_len], "positions": int32 [batch, seq_len]}, labels int64 [batch, seq_len]).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        vocab: int = 2048
        infinite: bool = True
        batches: int | None = None
        last: int = 0
        multimodal: bool = False

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        tokenizer: BaseTokenizer | None = None,
        **_: Any,
    ) -> None:
        self._vocab = config.vocab
        self._batches = config.batches
        self._last = config.last
        # A batch of text only: no token stands for an image or a video.
        self._more = {"special_tokens": {"image_id": -1, "video_id": -1}} if config.multimodal else {}
        self._shape = (local_batch_size, seq_len)
        self._rank = dp_rank
        self._batch = 0

    def __iter__(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        whole, length = self._shape
        while self._batches is None or self._batch < self._batches + (self._last > 0):
            batch = self._last if self._batch == self._batches else whole
            generator = torch.Generator().manual_seed(1_000_003 * self._rank + self._batch)
            self._batch += 1
            tokens = torch.randint(0, self._vocab, (batch, length + 1), generator=generator)
            positions = torch.arange(length, dtype=torch.int32).expand(batch, length).contiguous()
            inputs = {"input": tokens[:, :-1].contiguous(), "positions": positions, **self._more}
            yield inputs, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self._batch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._batch = state_dict.get("batch", 0)


class NoTokenizer(BaseTokenizer):
    """Satisfies the interface; the synthetic data is token ids already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()
        self.eos_id = 0

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return [0]

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 2048


@override(target=BaseDataLoader.Config)
def dataloader(
    cfg: BaseDataLoader.Config, vocab: int = 2048, batches: int | None = None, last: int = 0
) -> BaseDataLoader.Config:
    multimodal = type(cfg).__qualname__ == MULTIMODAL
    return SyntheticDataLoader.Config(vocab=vocab, batches=batches, last=last, multimodal=multimodal)


@override(target=BaseTokenizer.Config)
def tokenizer(cfg: BaseTokenizer.Config) -> BaseTokenizer.Config:
    return NoTokenizer.Config()


@override(target=OptimizersContainer.Config)
def adamw(cfg: OptimizersContainer.Config) -> OptimizersContainer.Config:
    return default_adamw(lr=1e-3)


@override(target=FlexAttention.Config)
def flex_to_sdpa(cfg: FlexAttention.Config) -> ScaledDotProductAttention.Config:
    return derive(cfg, ScaledDotProductAttention.Config)


@override(target=VarlenAttention.Config)
def varlen_to_sdpa(cfg: VarlenAttention.Config) -> ScaledDotProductAttention.Config:
    return derive(cfg, ScaledDotProductAttention.Config)
