"""More multimodal models: what `make conformance` runs besides those that the engine tests use."""

from __future__ import annotations

from typing import Any

from tests.conformance.multimodal.other_recipes import OTHER_RECIPES
from tests.conformance.multimodal.recipe import TEXT, TOWER, Ids, Recipe
from tests.conformance.multimodal.recipes import RECIPES, SIGLIP

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
)
ALL_RECIPES = RECIPES | {recipe.name: recipe for recipe in (*_RECIPES, *OTHER_RECIPES)}
