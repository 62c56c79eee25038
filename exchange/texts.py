"""JSON of manifests and headers, compressed with a preset dictionary.

For small messages, field and entry names would otherwise be a large part of the bytes.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

WORDS = b"".join((
    # Names of entries, in parts: those of PyTorch's, Hugging Face's and this project's models.
    b"classifier.fc.head.conv1.conv2.bn1.bn2.downsample.0.layer1.0.features.running_meanrunning_var",
    b"num_batches_trackedint64float64float16bfloat16lora_Alora_Bgammabetapatch_embeddingposition_embeddingcls_token",
    b"embeddings.word_embeddings.weightposition_embeddings.weighttoken_type_embeddings.weightLayerNorm.weight",
    b"encoder.layer.0.attention.attention.query.weightattention.self.key.weightattention.output.dense.weight",
    b"intermediate.dense.weightoutput.dense.biasoutput.LayerNorm.biaslayernorm_before.weightlayernorm_after.bias",
    b"model.layers.0.self_attn.q_proj.weightself_attn.k_proj.weightself_attn.v_proj.weightself_attn.o_proj.weight",
    b"mlp.gate_proj.weightmlp.up_proj.weightmlp.down_proj.weightinput_layernorm.weightpost_attention_layernorm.weight",
    b"encoder.layers.encoder_layer_0.ln_1.weightself_attention.in_proj_weightself_attention.in_proj_bias",
    b"self_attention.out_proj.weightmlp.0.weightmlp.3.biasblocks.0.attention_norm.weightattention.projection.weight",
    b"attention.value.biasmlp_norm.weightmlp.2.biasnorm1.weightnorm2.biasattn.qkv.weightattn.proj.biasmlp.fc1.weight",
    # An answer's header.
    b'{"experiment":"","client":"","round":1,"action":"evaluate","answers":"","holds":["","carries":"","missing":{},'
    b'"refused":"","notes":[],"layout":true,"left_out":null,"metrics":["metrics"],"checksum":"","secret":""}',
    # A manifest: one with its layout, and one whose layout is named.
    b'{"raw":[["weight",[64,64],"float32",""],["bias",[768],"float32",""],["weight",[3072,768],"float32",""]],"split":['
    b'"digests":"","id":"","names":[0,1],"sent":[0,1]},{"tree":"mode/0","block":"rest","names":[0,"tree":"control",'
    b'"action":"introduce","groups":{"layer/0":[],"options":{"final":true},"block":"query/key","wire":{"dtype":"int8",'
    b'"top_k":0.1,"feedback":true},{"dtype":"sign","differences":true},"keep":false,"wire":{},"base":"","sent":"all"},'
    b'{"experiment":"","plan":{"client":"client-site-node-","round":1,"action":"train","trains":[0,"returns":{"model":[0,'
    b'"remembers":{},"groups":{},"objective":"","options":{}},"record":"arrays","layout":"","parcels":[{"tree":"model",'
    b'"block":"model","names":[0,"digests":"","id":"","keep":true,"wire":{"dtype":"auto","differences":true,"left_out":0.6'
    b'},"base":"","sent":"all"}],"current":"","kept":[],"upload":{"dtype":"auto","differences":true,"feedback":true,'
    b'"seed":42,"left_out":0.6,"unbiased":true},"nonce":""}',
))  # fmt: skip
"""The preset dictionary. Server and clients must have the same one: a change requires a new version of the protocol."""


def to_text(value: Any) -> bytes:
    """A value as JSON without spaces."""
    return json.dumps(value, separators=(",", ":")).encode()


def compressed(text: bytes, *, words: bool = True) -> bytes:
    """A text as it is sent. `words`: with the dictionary; not if other versions of the protocol must read it."""
    if not words:
        return zlib.compress(text)
    compress = zlib.compressobj(zdict=WORDS)
    return compress.compress(text) + compress.flush()


def decompressed(data: bytes, limit: int) -> bytes:
    """The text of what was received, with the dictionary or without it.

    Raises:
        TypeError: it is not bytes.
        ValueError: the text has more than `limit` bytes.
        zlib.error: it cannot be read.
    """
    inflate = zlib.decompressobj(zdict=WORDS)
    text = inflate.decompress(data, limit)
    if inflate.unconsumed_tail:
        raise ValueError(f"more than {limit} bytes")
    return text
