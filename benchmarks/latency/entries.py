"""The models whose entries are sent: a tiny one, and ViT-B/32 with the entries of torchvision's vit_b_32."""

import torch

WIDTH, MLP, LAYERS, CLASSES = 768, 3072, 12, 1000


def shapes(model: str) -> dict[str, tuple[int, ...]]:
    if model == "tiny":
        return {"weight": (10, 64), "bias": (10,)}
    assert model == "vit-b-32", model
    entries: dict[str, tuple[int, ...]] = {
        "class_token": (1, 1, WIDTH),
        "conv_proj.weight": (WIDTH, 3, 32, 32),
        "conv_proj.bias": (WIDTH,),
        "encoder.pos_embedding": (1, 50, WIDTH),
    }
    for layer in range(LAYERS):
        for name, shape in {
            "ln_1.weight": (WIDTH,),
            "ln_1.bias": (WIDTH,),
            "self_attention.in_proj_weight": (3 * WIDTH, WIDTH),
            "self_attention.in_proj_bias": (3 * WIDTH,),
            "self_attention.out_proj.weight": (WIDTH, WIDTH),
            "self_attention.out_proj.bias": (WIDTH,),
            "ln_2.weight": (WIDTH,),
            "ln_2.bias": (WIDTH,),
            "mlp.0.weight": (MLP, WIDTH),
            "mlp.0.bias": (MLP,),
            "mlp.3.weight": (WIDTH, MLP),
            "mlp.3.bias": (WIDTH,),
        }.items():
            entries[f"encoder.layers.encoder_layer_{layer}.{name}"] = shape
    entries |= {"encoder.ln.weight": (WIDTH,), "encoder.ln.bias": (WIDTH,)}
    return entries | {"heads.head.weight": (CLASSES, WIDTH), "heads.head.bias": (CLASSES,)}


def state(model: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes(model).items()}
