"""A byte-level BPE tokenizer and the Qwen3-VL processor around it, built in code with no download."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer, Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

__all__ = ["SPECIAL_TOKENS", "build_processor", "build_tokenizer", "vocabulary"]

# Qwen3-VL's special tokens in its own order; H3's encoders look four of the vision tokens up by name.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

# Words that become one token each; every other text falls back to pieces and bytes. The labels H3 puts before
# its references are among them, so that a label takes a few rows, as it does with the real tokenizer.
_WORDS = (
    "Picture Audio Video seconds the a an of and in on at to with from is are it its over under into "
    "through by for his her their as that this two three one man woman child dog cat bird horse fox city "
    "street night day light dark sun rain snow wind sea sky river forest mountain house room window door "
    "car train boat red green blue white black golden slow fast wide close camera shot moves runs walks "
    "sings speaks plays dances looks smiles turns music voice sound piano drums water fire glass old "
    "young quiet bright"
)


def vocabulary(words: Iterable[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A BPE vocabulary and merge list in which each word, with and without a leading space, is one token.

    The 256 byte symbols come first, so that any text can be encoded. Merges grow each word from the left.
    """
    vocab = {symbol: index for index, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in words:
        # The byte-level alphabet spells a space as this letter.
        for spelled in (word, f"Ġ{word}"):
            for end in range(2, len(spelled) + 1):
                if spelled[:end] in vocab:
                    continue
                vocab[spelled[:end]] = len(vocab)
                merges.append((spelled[: end - 1], spelled[end - 1]))
    return vocab, merges


def build_tokenizer() -> Qwen2Tokenizer:
    """The tokenizer: Qwen's splitting rules over a vocabulary of some 900 entries, special tokens last."""
    vocab, merges = vocabulary(_WORDS.split())
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=merges, model_max_length=4096)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL_TOKENS[1:])})
    return tokenizer


def build_processor(tokenizer: Qwen2Tokenizer, *, patch_size: int = 16) -> Qwen3VLProcessor:
    """The processor, with pixel budgets so small that a 64x64 picture is four vision tokens."""
    vision = {
        "patch_size": patch_size,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    pixels = {"shortest_edge": 32 * 32, "longest_edge": 128 * 128}
    clip = {"shortest_edge": 2 * 32 * 32, "longest_edge": 8 * 64 * 64}
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=pixels, **vision),
        video_processor=Qwen3VLVideoProcessor(size=clip, **vision),
        tokenizer=tokenizer,
    )
