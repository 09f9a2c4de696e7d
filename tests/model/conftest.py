# PEFT imports bitsandbytes, which our start-up hook mends once XTuner is there
import xtuner.registry  # noqa: F401
