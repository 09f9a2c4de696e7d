"""Commands of ``xtuner-mamba``: one module a verb, with ``main(argv) -> int``."""
