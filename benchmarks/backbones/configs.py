"""Sizes of keras-hub's transformers: each about those of a published preset.

No preset was downloaded. The preset is the smallest whose heads four cores can
share, or the smallest one if there is no such preset. For encoders, decoders
and the like inside of a backbone, `Part` names the class.
"""

import dataclasses
from typing import Any

Sizes = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Part:
    """A model or layer that a backbone takes.

    Attributes:
      name: Its class, in `keras_hub.models` or `keras_hub.layers`.
      sizes: Its arguments.
    """

    name: str
    sizes: Sizes


def _encoder(layers: int, heads: int, width: int, vocabulary: int) -> Sizes:
    return {
        "vocabulary_size": vocabulary,
        "num_layers": layers,
        "num_heads": heads,
        "hidden_dim": width,
        "intermediate_dim": 4 * width,
    }


def _decoder(
    layers: int,
    heads: tuple[int, int],
    width: int,
    inner: int,
    vocabulary: int,
) -> Sizes:
    """Sizes of a decoder with heads of queries, and of keys and values."""
    return {
        "vocabulary_size": vocabulary,
        "num_layers": layers,
        "num_query_heads": heads[0],
        "num_key_value_heads": heads[1],
        "hidden_dim": width,
        "intermediate_dim": inner,
    }


def _vision(
    layers: int, heads: int, width: int, patch: int, image: int = 224
) -> Sizes:
    return {
        "image_shape": (image, image, 3),
        "patch_size": patch,
        "num_layers": layers,
        "num_heads": heads,
        "hidden_dim": width,
        "intermediate_dim": 4 * width,
    }


def _both(sides: Sizes) -> Sizes:
    """The same sizes for an encoder and for a decoder."""
    return {
        f"{side}_{key}": value
        for side in ("encoder", "decoder")
        for key, value in sides.items()
    }


def _clip_text(
    layers: int, heads: int, width: int, vocabulary: int = 49408
) -> Sizes:
    sizes = _encoder(layers, heads, width, vocabulary)
    return sizes | {"embedding_dim": width}


_DINO = _vision(12, 12, 768, 14, 518) | {"position_embedding_shape": (518, 518)}
_VIT_DET = {
    "image_shape": (1024, 1024, 3),
    "hidden_size": 768,
    "num_layers": 12,
    "intermediate_dim": 3072,
    "num_heads": 12,
    "global_attention_layer_indices": [2, 5, 8, 11],
}
_MIT = {
    "image_shape": (512, 512, 3),
    "num_layers": 4,
    "hidden_dims": [64, 128, 320, 512],
    "layerwise_depths": [2, 2, 2, 2],
    "layerwise_num_heads": [1, 2, 5, 8],
    "layerwise_sr_ratios": [8, 4, 2, 1],
    "layerwise_patch_sizes": [7, 3, 3, 3],
    "layerwise_strides": [4, 2, 2, 2],
    "max_drop_path_rate": 0.1,
}
_SAM3 = {
    "hidden_dim": 256,
    "intermediate_dim": 2048,
    "num_heads": 8,
}

TEXT: dict[str, Sizes] = {
    "Albert": _encoder(12, 12, 768, 30000) | {"embedding_dim": 128},
    "Bart": _encoder(6, 12, 768, 50265),
    "Bert": _encoder(4, 8, 512, 30522),
    "Bloom": _encoder(24, 16, 1024, 250880),
    "DebertaV3": _encoder(6, 12, 768, 128100),
    "DistilBert": _encoder(6, 12, 768, 30522),
    "EdRec": {
        "vocab_size": 50265,
        "num_layers_enc": 6,
        "num_layers_dec": 6,
        "hidden_dim": 768,
        "intermediate_dim": 3072,
        "num_heads": 12,
    },
    "Electra": {
        "vocab_size": 30522,
        "num_layers": 12,
        "num_heads": 4,
        "hidden_dim": 256,
        "embedding_dim": 128,
        "intermediate_dim": 1024,
    },
    "ESM": _encoder(6, 20, 320, 33),
    "FNet": {
        "vocabulary_size": 32000,
        "num_layers": 12,
        "hidden_dim": 768,
        "intermediate_dim": 3072,
    },
    "Falcon": {
        "vocabulary_size": 50304,
        "num_layers": 24,
        "num_attention_heads": 32,
        "hidden_dim": 2048,
        "intermediate_dim": 8192,
    },
    "GPT2": _encoder(12, 12, 768, 50257),
    "GPTNeoX": _encoder(6, 8, 512, 50304),
    "Gemma": _decoder(18, (8, 1), 2048, 32768, 256000) | {"head_dim": 256},
    "Gemma3": _decoder(18, (4, 1), 640, 2048, 262144)
    | {"head_dim": 256, "image_size": 896},
    "Gemma3n": {
        "text_vocab_size": 262400,
        "text_hidden_size": 2048,
        "num_hidden_layers": 30,
        "pad_token_id": 0,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "intermediate_size": [8192] * 30,
        "hidden_activation": "gelu_approximate",
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6,
        "sliding_window": 512,
        "rope_theta": 1e6,
        "max_position_embeddings": 32768,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "altup_num_inputs": 4,
        "laurel_rank": 64,
    },
    "Gemma4": _decoder(35, (8, 1), 1536, 6144, 262144)
    | {
        "head_dim": 256,
        "image_size": 768,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
    },
    "GptOss": _decoder(24, (64, 8), 2880, 2880, 201088)
    | {"head_dim": 64, "num_experts": 32, "top_k": 4},
    "Llama": _decoder(22, (32, 4), 2048, 5632, 32000),
    "Llama3": _decoder(16, (32, 8), 2048, 8192, 128256),
    "Mistral": _decoder(32, (32, 8), 4096, 14336, 32000),
    "Mixtral": _decoder(32, (32, 8), 4096, 14336, 32000)
    | {"num_experts": 8, "top_k": 2},
    "OPT": _encoder(12, 12, 768, 50272),
    "Phi3": _decoder(32, (32, 32), 3072, 8192, 32064),
    "Qwen": _decoder(28, (12, 2), 1536, 8960, 151936),
    "Qwen3": _decoder(28, (16, 8), 1024, 3072, 151936) | {"head_dim": 128},
    "Qwen3_5": _decoder(24, (8, 2), 1024, 3584, 248320)
    | {"head_dim": 256, "linear_num_value_heads": 16},
    "Qwen3_5Moe": {
        "vocabulary_size": 248320,
        "num_layers": 40,
        "num_query_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "hidden_dim": 2048,
        "moe_intermediate_dim": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "top_k": 8,
    },
    "Qwen3Moe": _decoder(48, (32, 4), 2048, 6144, 151936)
    | {
        "head_dim": 128,
        "moe_intermediate_dim": 768,
        "num_experts": 128,
        "top_k": 8,
    },
    "QwenMoe": _decoder(24, (16, 16), 2048, 5632, 151936)
    | {
        "moe_intermediate_dim": 1408,
        "shared_expert_intermediate_dim": 5632,
        "num_experts": 60,
        "top_k": 4,
    },
    "RWKV7": {
        "hidden_size": 768,
        "head_size": 64,
        "num_layers": 12,
        "vocabulary_size": 65536,
        "intermediate_dim": 3072,
    },
    "Roberta": _encoder(12, 12, 768, 50265),
    "RoformerV2": _encoder(12, 12, 768, 12000) | {"head_size": 64},
    "SmolLM3": {
        "vocabulary_size": 128256,
        "hidden_dim": 2048,
        "intermediate_dim": 11008,
        "num_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_layer_enabled_list": [True] * 36,
        "layer_types": ["full_attention"] * 36,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-6,
        "max_position_embeddings": 65536,
        "rope_theta": 5e6,
        "partial_rotary_factor": 1.0,
    },
    "T5": _encoder(6, 8, 512, 32128),
    "T5Gemma": {"vocabulary_size": 256000}
    | _both(
        {
            "hidden_dim": 512,
            "intermediate_dim": 1024,
            "num_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "layer_types": ["full_attention"] * 8,
        }
    ),
    "T5Gemma2": {"vocabulary_size": 262144}
    | _both(
        {
            "hidden_dim": 640,
            "intermediate_dim": 2048,
            "num_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "layer_types": ["full_attention"] * 18,
        }
    ),
    "XLMRoberta": _encoder(12, 12, 768, 250002),
    "XLNet": _encoder(12, 12, 768, 32000),
}
"""Backbones that read text, by the names of their classes."""

OTHERS: dict[str, Sizes] = {
    "BLIP2": {
        "vision_encoder": Part(
            "BLIP2VisionEncoder",
            {
                "image_size": 224,
                "patch_size": 14,
                "num_layers": 39,
                "num_heads": 16,
                "hidden_dim": 1408,
                "intermediate_dim": 6144,
                "use_patch_bias": True,
                "use_class_token": True,
                "use_mha_bias": True,
                "use_mlp_bias": True,
                "dropout_rate": 0.0,
                "layer_norm_epsilon": 1e-6,
                "initializer_range": 0.02,
            },
        ),
        "qformer": Part(
            "BLIP2QFormer",
            {
                "num_query_tokens": 32,
                "num_layers": 12,
                "num_heads": 12,
                "hidden_dim": 768,
                "intermediate_dim": 3072,
                "vision_dim": 1408,
                "cross_attention_frequency": 2,
                "dropout": 0.0,
                "layer_norm_epsilon": 1e-12,
            },
        ),
        "language_model": Part(
            "BLIP2CustomOPT",
            _encoder(32, 32, 2560, 50304)
            | {
                "num_query_tokens": 32,
                "qformer_hidden_dim": 768,
                "dropout": 0.0,
                "max_sequence_length": 2048,
            },
        ),
    },
    "CLIP": {
        "vision_encoder": Part("CLIPVisionEncoder", _vision(12, 12, 768, 32)),
        "text_encoder": Part("CLIPTextEncoder", _clip_text(12, 8, 512)),
        "projection_dim": 512,
    },
    "DINOV2": _DINO,
    "DINOV3": _vision(12, 12, 768, 16),
    "DeiT": _vision(12, 12, 768, 16),
    "DepthAnything": {
        "image_encoder": Part("DINOV2Backbone", _DINO),
        "reassemble_factors": [4, 2, 1, 0.5],
        "neck_hidden_dims": [96, 192, 384, 768],
        "fusion_hidden_dim": 128,
        "head_hidden_dim": 32,
        "head_in_index": -1,
        "feature_keys": ["stage3", "stage6", "stage9", "stage12"],
    },
    "Flux": {
        # A quarter of the blocks, which are built slowly.
        "input_channels": 64,
        "hidden_size": 3072,
        "mlp_ratio": 4.0,
        "num_heads": 24,
        "depth": 5,
        "depth_single_blocks": 10,
        "axes_dim": [16, 56, 56],
        "theta": 10000,
        "use_bias": True,
        "image_shape": (1024, 64),
        "text_shape": (256, 4096),
        "image_ids_shape": (1024, 3),
        "text_ids_shape": (256, 3),
        "y_shape": (768,),
    },
    "MetaCLIP2": {
        "vision_encoder": Part(
            "MetaCLIP2VisionEncoder", _vision(32, 16, 1280, 14)
        ),
        "text_encoder": Part(
            "MetaCLIP2TextEncoder", _clip_text(24, 16, 1024, 901629)
        ),
        "projection_dim": 1024,
    },
    "MiT": _MIT,
    "Moonshine": {
        "vocabulary_size": 32768,
        "filter_dim": 288,
        "encoder_num_layers": 6,
        "decoder_num_layers": 6,
        "hidden_dim": 288,
        "intermediate_dim": 1152,
        "encoder_num_heads": 8,
        "decoder_num_heads": 8,
    },
    "PARSeq": {
        "image_encoder": Part(
            "ViTBackbone",
            {
                "image_shape": (32, 128, 3),
                "patch_size": (4, 8),
                "num_layers": 12,
                "num_heads": 6,
                "hidden_dim": 384,
                "mlp_dim": 1536,
                "use_class_token": False,
            },
        ),
        "vocabulary_size": 97,
        "max_label_length": 25,
        "decoder_hidden_dim": 384,
        "num_decoder_layers": 1,
        "num_decoder_heads": 12,
        "decoder_mlp_dim": 1536,
    },
    "PaliGemma": _decoder(18, (8, 1), 2048, 32768, 257152)
    | {
        "head_dim": 256,
        "image_size": 224,
        "vit_patch_size": 14,
        "vit_num_heads": 16,
        "vit_hidden_dim": 1152,
        "vit_num_layers": 27,
        "vit_intermediate_dim": 4304,
    },
    "SAM": {
        "image_encoder": Part("ViTDetBackbone", _VIT_DET),
        "prompt_encoder": Part("SAMPromptEncoder", {}),
        "mask_decoder": Part(
            "SAMMaskDecoder",
            {
                "hidden_size": 256,
                "num_layers": 2,
                "intermediate_dim": 2048,
                "num_heads": 8,
            },
        ),
    },
    "SAM3PromptableConcept": {
        "vision_encoder": Part(
            "SAM3VisionEncoder",
            # A quarter of the blocks, which are built with values.
            _vision(8, 16, 1024, 14, 1008)
            | {
                "intermediate_dim": 4736,
                "fpn_hidden_dim": 256,
                "fpn_scale_factors": [4.0, 2.0, 1.0, 0.5],
                "window_size": 24,
                "global_attn_indexes": [1, 3, 5, 7],
            },
        ),
        "text_encoder": Part("SAM3TextEncoder", _clip_text(6, 16, 1024)),
        "geometry_encoder": Part(
            "SAM3GeometryEncoder", _SAM3 | {"num_layers": 3, "roi_size": 7}
        ),
        "detr_encoder": Part("SAM3DetrEncoder", _SAM3 | {"num_layers": 6}),
        "detr_decoder": Part(
            "SAM3DetrDecoder",
            _SAM3
            | {
                "image_shape": (1008, 1008, 3),
                "patch_size": 14,
                "num_layers": 6,
                "num_queries": 200,
            },
        ),
        "mask_decoder": Part(
            "SAM3MaskDecoder",
            {"num_upsampling_stages": 3, "hidden_dim": 256, "num_heads": 8},
        ),
    },
    "SegFormer": {
        "image_encoder": Part("MiTBackbone", _MIT),
        "projection_filters": 256,
    },
    "SigLIP": {
        "vision_encoder": Part("SigLIPVisionEncoder", _vision(12, 12, 768, 16)),
        "text_encoder": Part(
            "SigLIPTextEncoder", _clip_text(12, 12, 768, 32000)
        ),
    },
    "StableDiffusion3": {
        "mmdit_patch_size": 2,
        "mmdit_hidden_dim": 1536,
        "mmdit_num_layers": 24,
        "mmdit_num_heads": 24,
        "mmdit_position_size": 192,
        "mmdit_qk_norm": None,
        "mmdit_dual_attention_indices": None,
        "vae": Part(
            "VAEBackbone",
            {
                "encoder_num_filters": [128, 256, 512, 512],
                "encoder_num_blocks": [2, 2, 2, 2],
                "decoder_num_filters": [512, 512, 256, 128],
                "decoder_num_blocks": [3, 3, 3, 3],
            },
        ),
        "clip_l": Part(
            "CLIPTextEncoder",
            _clip_text(12, 12, 768) | {"intermediate_output_index": -2},
        ),
        "clip_g": Part(
            "CLIPTextEncoder",
            _clip_text(32, 20, 1280) | {"intermediate_output_index": -2},
        ),
    },
    "SwinTransformer": {
        "image_shape": (224, 224, 3),
        "embed_dim": 128,
        "depths": (2, 2, 18, 2),
        "num_heads": (4, 8, 16, 32),
        "window_size": 7,
    },
    "ViT": {
        "image_shape": (224, 224, 3),
        "patch_size": 16,
        "num_layers": 12,
        "num_heads": 12,
        "hidden_dim": 768,
        "mlp_dim": 3072,
    },
    "ViTDet": _VIT_DET,
    "VideoPrism": {
        "image_shape": (288, 288, 3),
        "num_frames": 16,
        "patch_size": 18,
        "hidden_dim": 768,
        "intermediate_dim": 3072,
        "num_heads": 12,
        "num_spatial_layers": 12,
        "num_temporal_layers": 4,
        "num_auxiliary_layers": 0,
    },
    "Whisper": _encoder(6, 8, 512, 51865),
}
"""Backbones that read images, sounds or several kinds of inputs."""
