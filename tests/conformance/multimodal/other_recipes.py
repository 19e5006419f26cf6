"""Further multimodal models: sound, video, experts, and towers and positions of their own."""

from __future__ import annotations

from typing import Any

from tests.conformance.multimodal.recipe import TEXT, TOWER, Ids, Recipe
from tests.conformance.multimodal.recipes import (
    QWEN,
    QWEN_MEDIA,
    QWEN_SIZES,
    SIGLIP,
    qwen2_5_processor,
    qwen2_5_vl,
    qwen3_processor,
    qwen3_vl,
    rope,
)

GLM = (
    "<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"
)  # fmt: skip


def _glm4v(ids: Ids) -> dict[str, Any]:
    text = dict(TEXT, model_type="glm4v_text", attention_bias=True)
    vision = dict(hidden_size=64, out_hidden_size=128, depth=2, num_heads=2, intermediate_size=96, patch_size=14)
    return dict(
        text_config=dict(text, rope_parameters=rope([2, 3, 3]) | {"partial_rotary_factor": 0.5}),
        vision_config=dict(vision, image_size=56),
        image_token_id=ids["<|image|>"],
        video_token_id=ids["<|video|>"],
        image_start_token_id=ids["<|begin_of_image|>"],
        image_end_token_id=ids["<|end_of_image|>"],
        video_start_token_id=ids["<|begin_of_video|>"],
        video_end_token_id=ids["<|end_of_video|>"],
    )


def _glm4v_processor(tokenizer: Any, config: Any) -> Any:
    from transformers import Glm4vImageProcessor, Glm4vProcessor, Glm4vVideoProcessor

    pixels = dict(size={"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 32}, patch_size=14, merge_size=2)
    return Glm4vProcessor(Glm4vImageProcessor(**pixels), tokenizer, Glm4vVideoProcessor(**pixels))


def _qwen3_vl_moe(ids: Ids) -> dict[str, Any]:
    config = qwen3_vl(ids)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96, norm_topk_prob=True)
    return config | {"text_config": config["text_config"] | {"model_type": "qwen3_vl_moe_text"} | experts}


def _paligemma(ids: Ids) -> dict[str, Any]:
    text = dict(TEXT, model_type="gemma", use_bidirectional_attention=False)
    return dict(
        text_config=text | {"tie_word_embeddings": True},
        vision_config=dict(
            TOWER, model_type="siglip_vision_model", image_size=56, patch_size=14, vision_use_head=False
        ),
        projection_dim=TEXT["hidden_size"],
        hidden_size=TEXT["hidden_size"],
        image_token_index=ids["<image>"],
    )


def _paligemma_processor(tokenizer: Any, config: Any) -> Any:
    from transformers import PaliGemmaProcessor, SiglipImageProcessor

    images = SiglipImageProcessor(size={"height": 56, "width": 56})
    images.image_seq_length = 16
    return PaliGemmaProcessor(images, tokenizer)


def _qwen2_5_video(ids: Ids) -> dict[str, Any]:
    # Text after a video whose frames are further apart than it is wide continues at other positions in transformers
    # (behind its width) than in vLLM and Qwen's own program (behind its last frame).
    config = qwen2_5_vl(ids)
    return config | {"vision_config": config["vision_config"] | {"tokens_per_second": 1}}


def _qwen2_audio(ids: Ids) -> dict[str, Any]:
    # As many positions as half a minute of sound has, which vLLM pads to.
    tower = dict(d_model=64, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=96, num_mel_bins=16)
    return dict(
        text_config=dict(TEXT, model_type="qwen2"),
        audio_config=dict(tower, model_type="qwen2_audio_encoder", max_source_positions=1500),
        audio_token_index=ids["<|AUDIO|>"],
    )


def _qwen2_audio_processor(tokenizer: Any, config: Any) -> Any:
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

    features = WhisperFeatureExtractor(feature_size=config.audio_config.num_mel_bins, chunk_length=30)
    return Qwen2AudioProcessor(features, tokenizer)


OTHER_RECIPES = (
    Recipe(
        "Qwen2AudioForConditionalGeneration",
        "qwen2_audio",
        ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
        _qwen2_audio,
        _qwen2_audio_processor,
        {"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"},
        rename={"language_model.model.model.": "language_model.model."},
    ),
    Recipe(
        "Glm4vForConditionalGeneration",
        "glm4v",
        GLM,
        _glm4v,
        _glm4v_processor,
        {"image": "<|begin_of_image|><|image|><|end_of_image|>"},
    ),
    Recipe(
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl",
        QWEN,
        _qwen2_5_video,
        qwen2_5_processor,
        {"video": "<|vision_start|><|video_pad|><|vision_end|>"},
        sizes=QWEN_SIZES,
        variant="video",
    ),
    Recipe(
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe",
        QWEN,
        _qwen3_vl_moe,
        qwen3_processor,
        QWEN_MEDIA,
        sizes=QWEN_SIZES,
        transposed=("experts.gate_up_proj", "experts.down_proj"),
    ),
    Recipe(
        "PaliGemmaForConditionalGeneration",
        "paligemma",
        ("<image>", "\n"),
        _paligemma,
        _paligemma_processor,
        {"image": "<image>"},
        rename=SIGLIP,
        mutual=("token_type_ids", "labels"),
        from_zero=True,
        one_in_front=True,
    ),
)
