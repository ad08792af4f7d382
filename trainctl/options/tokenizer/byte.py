"""Byte tokenizer: ids 0 to 255 are bytes, one more ends a document, and one hides a token."""

from __future__ import annotations

from trainctl.config.schema import TokenizerConfig
from trainctl.models.tokenizer_files import TokenizerFacts
from trainctl.options.tokenizer import TokenizerSource

END_OF_DOCUMENT = 256
"""The one id in a corpus that is not a byte."""

MASK = 257
"""Id that hides a token from an encoder. It is never in a corpus, and needs a row in the embedding
only then.
"""

SPEC = TokenizerSource(
    name="byte",
    keys=TokenizerConfig,
    build="trainctl.data.tokenizer:byte_tokenizer",
    facts=lambda section: TokenizerFacts(END_OF_DOCUMENT + 1, END_OF_DOCUMENT, mask_token=MASK),
    is_byte_level=True,
    why_not_published="the byte tokenizer has none; "
    f"ids 0 to 255 are bytes, {END_OF_DOCUMENT} ends a document",
)
