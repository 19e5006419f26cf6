"""The multimodal models that are made."""

from __future__ import annotations

from typing import Any

from tests.conformance.multimodal.recipe import TEXT, TOWER, Ids, Recipe

QWEN = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>", "<|im_start|>", "<|im_end|>")
QWEN_MEDIA = {"image": "<|vision_start|><|image_pad|><|vision_end|>"}
SIGLIP = {"vision_tower.": "vision_tower.vision_model."}
QWEN_SIZES = ((56, 84), (84, 56))


def _llava(ids: Ids) -> dict[str, Any]:
    # vLLM leaves out the tower's last block: what it has are as many as the language model's.
    tower = dict(TOWER, num_hidden_layers=TEXT["num_hidden_layers"] + 1, projection_dim=64)
    return dict(
        text_config=dict(TEXT, model_type="llama"),
        vision_config=dict(tower, model_type="clip_vision_model", image_size=56, patch_size=14),
        image_token_index=ids["<image>"],
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )


def _llava_processor(tokenizer: Any, config: Any) -> Any:
    from transformers import CLIPImageProcessor, LlavaProcessor

    side = {"height": 56, "width": 56}
    images = CLIPImageProcessor(size={"shortest_edge": 56}, crop_size=side)
    return LlavaProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )


def _gemma3(ids: Ids) -> dict[str, Any]:
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    text = dict(TEXT, model_type="gemma3_text", sliding_window=16, query_pre_attn_scalar=32, layer_types=layers)
    text.pop("tie_word_embeddings")
    return dict(
        text_config=text,
        vision_config=dict(TOWER, model_type="siglip_vision_model", image_size=56, patch_size=14),
        mm_tokens_per_image=4,
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
        image_token_index=ids["<image_soft_token>"],
    )


def _gemma3_processor(tokenizer: Any, config: Any) -> Any:
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    images = Gemma3ImageProcessor(size={"height": 56, "width": 56})
    return Gemma3Processor(images, tokenizer, image_seq_length=4)


def rope(sections: list[int]) -> dict[str, Any]:
    """Rotary positions of three kinds, in so many columns each."""
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}


def qwen_tokens(ids: Ids) -> dict[str, Any]:
    """What Qwen configurations call their special tokens."""
    return dict(
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )


def _qwen2_vl(ids: Ids) -> dict[str, Any]:
    return dict(
        text_config=dict(TEXT, model_type="qwen2_vl_text", rope_parameters=rope([4, 6, 6])),
        vision_config=dict(embed_dim=64, hidden_size=128, depth=2, num_heads=2, mlp_ratio=2, patch_size=14),
        **qwen_tokens(ids),
    )


def qwen2_5_vl(ids: Ids) -> dict[str, Any]:
    """Qwen2.5-VL's configuration."""
    vision = dict(hidden_size=64, out_hidden_size=128, depth=2, num_heads=2, intermediate_size=96, patch_size=14)
    return dict(
        text_config=dict(TEXT, model_type="qwen2_5_vl_text", rope_parameters=rope([4, 6, 6])),
        vision_config=dict(vision, fullatt_block_indexes=[1], window_size=56),
        **qwen_tokens(ids),
    )


def qwen3_vl(ids: Ids) -> dict[str, Any]:
    """Qwen3-VL's configuration."""
    vision = dict(hidden_size=64, out_hidden_size=128, depth=2, num_heads=2, intermediate_size=96, patch_size=14)
    interleaved = rope([4, 6, 6]) | {"mrope_interleaved": True}
    return dict(
        text_config=dict(TEXT, model_type="qwen3_vl_text", num_hidden_layers=5, rope_parameters=interleaved),
        vision_config=dict(vision, num_position_embeddings=16, deepstack_visual_indexes=[0, 1]),
        **qwen_tokens(ids),
    )


def _qwen2_processor(tokenizer: Any, config: Any) -> Any:
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    pixels = dict(size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}, patch_size=14, merge_size=2)
    return Qwen2VLProcessor(Qwen2VLImageProcessor(**pixels), tokenizer, Qwen2VLVideoProcessor(**pixels))


def qwen2_5_processor(tokenizer: Any, config: Any) -> Any:
    """Qwen2.5-VL's processor."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    pixels = dict(size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}, patch_size=14, merge_size=2)
    return Qwen2_5_VLProcessor(Qwen2VLImageProcessor(**pixels), tokenizer, Qwen2VLVideoProcessor(**pixels))


def qwen3_processor(tokenizer: Any, config: Any) -> Any:
    """Qwen3-VL's processor."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    pixels = dict(size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}, patch_size=14, merge_size=2)
    return Qwen3VLProcessor(Qwen2VLImageProcessor(**pixels), tokenizer, Qwen3VLVideoProcessor(**pixels))


def _mistral3(ids: Ids) -> dict[str, Any]:
    return dict(
        text_config=dict(TEXT, model_type="mistral", sliding_window=None),
        vision_config=dict(TOWER, model_type="pixtral", image_size=84, patch_size=14, head_dim=32),
        image_token_index=ids["[IMG]"],
        spatial_merge_size=2,
        vision_feature_layer=-1,
    )


def _mistral3_processor(tokenizer: Any, config: Any) -> Any:
    from transformers import PixtralImageProcessor, PixtralProcessor

    images = PixtralImageProcessor(size={"longest_edge": 84}, patch_size={"height": 14, "width": 14})
    return PixtralProcessor(images, tokenizer, patch_size=14, spatial_merge_size=2)


def _llama4(ids: Ids) -> dict[str, Any]:
    text = dict(TEXT, model_type="llama4_text", num_hidden_layers=4, intermediate_size=64, intermediate_size_mlp=192)
    vision = dict(hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, image_size=56)
    vision |= dict(patch_size=14, vision_output_dim=64, projector_input_dim=64, projector_output_dim=64)
    return dict(
        text_config=dict(
            text, num_local_experts=4, num_experts_per_tok=1, attention_chunk_size=32, interleave_moe_layer_step=2
        ),
        vision_config=dict(vision, pixel_shuffle_ratio=0.5, model_type="llama4_vision_model"),
        image_token_index=ids["<|patch|>"],
        boi_token_index=ids["<|image_start|>"],
        eoi_token_index=ids["<|image_end|>"],
    )


def _llama4_processor(tokenizer: Any, config: Any) -> Any:
    from transformers import Llama4ImageProcessor, Llama4Processor

    images = Llama4ImageProcessor(size={"height": 56, "width": 56}, max_patches=4)
    return Llama4Processor(images, tokenizer, patch_size=14, pixel_shuffle_ratio=0.5)


LLAMA4 = (
    "<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>"
)  # fmt: skip

RECIPES = {
    recipe.architecture: recipe
    for recipe in (
        Recipe(
            "LlavaForConditionalGeneration",
            "llava",
            ("<image>",),
            _llava,
            _llava_processor,
            {"image": "<image>"},
            rename=SIGLIP,
        ),
        Recipe(
            "Gemma3ForConditionalGeneration",
            "gemma3",
            ("<start_of_image>", "<end_of_image>", "<image_soft_token>", "\n", "\n\n", "\n\n\n", "\n\n\n\n"),
            _gemma3,
            _gemma3_processor,
            {"image": "<start_of_image>"},
            {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
            rename=SIGLIP,
            mutual=("token_type_ids", "mm_token_type_ids"),
        ),
        Recipe(
            "Qwen2VLForConditionalGeneration",
            "qwen2_vl",
            QWEN,
            _qwen2_vl,
            _qwen2_processor,
            QWEN_MEDIA,
            sizes=QWEN_SIZES,
        ),
        Recipe(
            "Qwen2_5_VLForConditionalGeneration",
            "qwen2_5_vl",
            QWEN,
            qwen2_5_vl,
            qwen2_5_processor,
            QWEN_MEDIA,
            sizes=QWEN_SIZES,
        ),
        Recipe(
            "Qwen3VLForConditionalGeneration",
            "qwen3_vl",
            QWEN,
            qwen3_vl,
            qwen3_processor,
            QWEN_MEDIA,
            sizes=QWEN_SIZES,
        ),
        Recipe(
            "Mistral3ForConditionalGeneration",
            "mistral3",
            ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
            _mistral3,
            _mistral3_processor,
            {"image": "[IMG]"},
            sizes=((84, 56), (56, 56)),
        ),
        Recipe(
            "Llama4ForConditionalGeneration",
            "llama4",
            LLAMA4,
            _llama4,
            _llama4_processor,
            {"image": "<|image|>"},
            interleaved=True,
            no_media="vLLM's tower hands its product for CPUs (oneDNN) a transposed tensor",
        ),
    )
}
