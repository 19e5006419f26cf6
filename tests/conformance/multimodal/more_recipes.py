"""More multimodal models: what `make conformance` runs besides those that the engine tests use."""

from __future__ import annotations

from typing import Any

from tests.conformance.multimodal.recipe import TEXT, TOWER, Ids, Recipe
from tests.conformance.multimodal.recipes import (
    RECIPES,
    SIGLIP,
)

SIDE = {"height": 56, "width": 56}


def _llava_next(ids: Ids) -> dict[str, Any]:
    return dict(
        text_config=dict(TEXT, model_type="llama"),
        vision_config=dict(TOWER, model_type="clip_vision_model", image_size=56, patch_size=14, projection_dim=64),
        image_token_index=ids["<image>"],
        image_grid_pinpoints=[[56, 112], [112, 56], [112, 112]],
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )


def _llava_next_processor(tokenizer: Any, config: Any) -> Any:
    from transformers import LlavaNextImageProcessor, LlavaNextProcessor

    images = LlavaNextImageProcessor(
        size={"shortest_edge": 56}, crop_size=SIDE, image_grid_pinpoints=config.image_grid_pinpoints
    )
    more = dict(patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1)
    return LlavaNextProcessor(images, tokenizer, **more)


def _llava_onevision(ids: Ids) -> dict[str, Any]:
    return dict(
        text_config=dict(TEXT, model_type="qwen2"),
        vision_config=dict(
            TOWER, model_type="siglip_vision_model", image_size=56, patch_size=14, vision_use_head=False
        ),
        image_token_index=ids["<image>"],
        video_token_index=ids["<video>"],
        image_grid_pinpoints=[[56, 112], [112, 56], [112, 112]],
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_9",
    )


def _llava_onevision_processor(tokenizer: Any, config: Any) -> Any:
    from transformers import LlavaOnevisionImageProcessor, LlavaOnevisionProcessor, LlavaOnevisionVideoProcessor

    images = LlavaOnevisionImageProcessor(size=SIDE, image_grid_pinpoints=config.image_grid_pinpoints)
    return LlavaOnevisionProcessor(
        images,
        tokenizer,
        LlavaOnevisionVideoProcessor(size=SIDE),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_9",
    )


def _idefics3(ids: Ids) -> dict[str, Any]:
    return dict(
        text_config=dict(TEXT, model_type="llama"),
        vision_config=dict(TOWER, model_type="idefics3_vision", image_size=56, patch_size=14),
        image_token_id=ids["<image>"],
        scale_factor=2,
        pad_token_id=TEXT["pad_token_id"],
    )


def _idefics3_processor(tokenizer: Any, config: Any) -> Any:
    from transformers import Idefics3ImageProcessor, Idefics3Processor

    images = Idefics3ImageProcessor(
        size={"longest_edge": 56}, max_image_size={"longest_edge": 56}, do_image_splitting=False
    )
    return Idefics3Processor(images, tokenizer, image_seq_len=4)


def _paligemma(ids: Ids) -> dict[str, Any]:
    text = {k: v for k, v in TEXT.items() if k != "tie_word_embeddings"}
    return dict(
        text_config=dict(text, model_type="gemma"),
        vision_config=dict(
            TOWER,
            model_type="siglip_vision_model",
            image_size=56,
            patch_size=14,
            vision_use_head=False,
            projection_dim=128,
        ),
        image_token_index=ids["<image>"],
        projection_dim=128,
    )


def _paligemma_processor(tokenizer: Any, config: Any) -> Any:
    from transformers import PaliGemmaProcessor, SiglipImageProcessor

    images = SiglipImageProcessor(size=SIDE)
    images.image_seq_length = 16
    return PaliGemmaProcessor(images, tokenizer)


def _internvl(ids: Ids) -> dict[str, Any]:
    vision = dict(TOWER, model_type="internvl_vision", image_size=[56, 56], patch_size=[14, 14])
    return dict(
        text_config=dict(TEXT, model_type="qwen2"),
        vision_config=vision,
        image_token_id=ids["<IMG_CONTEXT>"],
        downsample_ratio=0.5,
    )


def _internvl_processor(tokenizer: Any, config: Any) -> Any:
    from transformers import GotOcr2ImageProcessor, InternVLProcessor, InternVLVideoProcessor

    images = GotOcr2ImageProcessor(size=SIDE, crop_to_patches=False)
    return InternVLProcessor(images, tokenizer, InternVLVideoProcessor(size=SIDE), image_seq_length=4)


def _qwen2_audio(ids: Ids) -> dict[str, Any]:
    audio = dict(d_model=64, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=96, max_source_positions=1500)
    return dict(
        text_config=dict(TEXT, model_type="qwen2"),
        audio_config=dict(audio, model_type="qwen2_audio_encoder", num_mel_bins=32),
        audio_token_index=ids["<|AUDIO|>"],
    )


def _qwen2_audio_processor(tokenizer: Any, config: Any) -> Any:
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

    return Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=32), tokenizer)


IDEFICS = ("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
IDEFICS += tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
INTERN = ("<img>", "</img>", "<IMG_CONTEXT>", "<video>")

_RECIPES = (
    Recipe(
        "LlavaNextForConditionalGeneration",
        "llava_next",
        ("<image>",),
        _llava_next,
        _llava_next_processor,
        {"image": "<image>"},
        rename=SIGLIP,
    ),
    Recipe(
        "LlavaOnevisionForConditionalGeneration",
        "llava_onevision",
        ("<image>", "<video>"),
        _llava_onevision,
        _llava_onevision_processor,
        {"image": "<image>"},
        rename=SIGLIP,
    ),
    Recipe(
        "Idefics3ForConditionalGeneration",
        "idefics3",
        IDEFICS,
        _idefics3,
        _idefics3_processor,
        {"image": "<image>"},
    ),
    Recipe(
        "PaliGemmaForConditionalGeneration",
        "paligemma",
        ("<image>", "\n"),
        _paligemma,
        _paligemma_processor,
        {"image": "<image>"},
        rename=SIGLIP,
        mutual=("token_type_ids",),
    ),
    Recipe(
        "InternVLForConditionalGeneration",
        "internvl",
        INTERN,
        _internvl,
        _internvl_processor,
        {"image": "<IMG_CONTEXT>"},
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    Recipe(
        "Qwen2AudioForConditionalGeneration",
        "qwen2_audio",
        ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
        _qwen2_audio,
        _qwen2_audio_processor,
        {"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"},
        rename={"language_model.model.model.": "language_model.model."},
    ),
)
ALL_RECIPES = RECIPES | {recipe.architecture: recipe for recipe in _RECIPES}
