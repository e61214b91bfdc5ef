"""Settings that are one of a few words."""

from enum import Enum


class FlashAttn(Enum):
    AUTO = "auto"
    ON = "on"
    OFF = "off"


class Speculate(Enum):
    AUTO = "auto"  # where it makes replies faster
    OFF = "off"


class KvType(Enum):
    F16 = "f16"
    F32 = "f32"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    Q5_1 = "q5_1"
    Q5_0 = "q5_0"
    Q4_1 = "q4_1"
    Q4_0 = "q4_0"
    IQ4_NL = "iq4_nl"

    @property
    def quantised(self) -> bool:
        return self not in (KvType.F16, KvType.F32, KvType.BF16)


KV_TYPES = ", ".join(kind.value for kind in KvType)


class WritePolicy(Enum):
    ALL = "all"
    REUSED = "reused"


class EngineKind(Enum):
    LLAMA = "llama"
    VLLM = "vllm"


class NamespaceBy(Enum):
    AUTO = "auto"
    NONE = "none"
    API_KEY = "api-key"


class ReasoningHistory(Enum):
    AUTO = "auto"
    KEEP = "keep"
    TEMPLATE = "template"


class ReasoningSwitch(Enum):
    AUTO = "auto"  # as the template and the request say
    ON = "on"
    OFF = "off"


class Overflow(Enum):
    ERROR = "error"
    TRIM = "trim"


class MediaPolicy(Enum):
    TEXT = "text"
    ERROR = "error"


class LogLevel(Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class SplitMode(Enum):
    NONE = "none"
    LAYER = "layer"
    ROW = "row"
    TENSOR = "tensor"


class Numa(Enum):
    DISTRIBUTE = "distribute"
    ISOLATE = "isolate"
    NUMACTL = "numactl"


class RopeScaling(Enum):
    NONE = "none"
    LINEAR = "linear"
    YARN = "yarn"


class Fit(Enum):
    ON = "on"
    OFF = "off"
