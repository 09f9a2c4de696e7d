from xtuner_mamba.engine.hooks.packed_layout_hook import PackedLayoutHook

__all__ = ["PackedLayoutHook"]
