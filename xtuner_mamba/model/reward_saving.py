"""Classes that hold a language model and the head of a reward model."""

from torch import nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForSequenceClassification,
    MambaConfig,
    PretrainedConfig,
    PreTrainedModel,
)


def can_save_reward_model(llm: nn.Module) -> bool:
    """Tell whether there is a class that holds a model and its head, or XTuner looks for one.

    Args:
        llm: The layers below the language head.
    """
    # of code from the Hub
    is_remote = "AutoModelForCausalLM" in (getattr(llm.config, "auto_map", None) or {})
    return is_remote or has_sequence_classification(llm)


def has_sequence_classification(llm: nn.Module) -> bool:
    """Tell whether :func:`sequence_classification` knows a class for a model."""
    config_class = type(llm.config)
    return config_class is MambaConfig or config_class in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING


def sequence_classification(config: PretrainedConfig) -> PreTrainedModel:
    """Build a model with a linear head, ``score``, on the last token; that of a Mamba is ours."""
    if type(config) is not MambaConfig:
        return AutoModelForSequenceClassification.from_config(config)
    from xtuner_mamba.model.modeling_mamba_reward import MambaForSequenceClassification

    MambaForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
    return MambaForSequenceClassification(config)
