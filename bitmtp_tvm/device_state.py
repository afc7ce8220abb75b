"""The state that a device was measured in: name, driver, clocks, power; as far as it tells."""

import csv
import platform
import subprocess
from pathlib import Path

from bitmtp_tvm.device import read_device
from bitmtp_tvm.threads import usable_cores

# Fields of nvidia-smi, and what they are called here.
NVIDIA_SMI = {
    "driver_version": "driver",
    "pstate": "performance_state",
    "clocks.sm": "clock_sm",
    "clocks.max.sm": "clock_sm_most",
    "clocks.mem": "clock_memory",
    "power.draw": "power",
    "power.limit": "power_limit",
    "temperature.gpu": "temperature",
}
FREQUENCY = "/sys/devices/system/cpu/cpu0/cpufreq"


def device_state(kind: str) -> dict[str, str]:
    """What the machine says about the device of a target kind ("cuda" or "llvm") at this moment.

    Everything that cannot be found out is left out; nothing here fails for want of a tool.
    """
    if kind == "cuda":
        return {"device": read_device().name, **(_nvidia_smi() or _jetson())}
    return {"device": _processor(), **_processor_state()}


def _nvidia_smi() -> dict[str, str]:
    query = f"--query-gpu={','.join(NVIDIA_SMI)}"
    output = _output("nvidia-smi", query, "--format=csv,noheader", "--id=0")
    row = next(csv.reader(output.splitlines(), skipinitialspace=True), [])
    if len(row) != len(NVIDIA_SMI):
        return {}
    pairs = zip(NVIDIA_SMI.values(), row, strict=True)
    return {name: value for name, value in pairs if value and not value.startswith("[")}


def _jetson() -> dict[str, str]:
    """A Jetson has no nvidia-smi that knows clocks; its kernel shows them as files."""
    found = {"board": _text("/proc/device-tree/model")}
    for folder in sorted(Path("/sys/class/devfreq").glob("*.gpu")):
        found["clock_sm"] = _text(folder / "cur_freq")
        found["clock_sm_most"] = _text(folder / "max_freq")
    mode = _output("nvpmodel", "-q").splitlines()
    found["power_mode"] = mode[0].removeprefix("NV Power Mode:").strip() if mode else ""
    return {name: value for name, value in found.items() if value}


def _processor() -> str:
    for line in _text("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def _processor_state() -> dict[str, str]:
    found = {
        "cores": str(len(usable_cores())),
        "governor": _text(f"{FREQUENCY}/scaling_governor"),
        "clock_khz": _text(f"{FREQUENCY}/scaling_cur_freq"),
        "load": " ".join(_text("/proc/loadavg").split()[:3]),
    }
    return {name: value for name, value in found.items() if value}


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace").strip(" \n\0")
    except OSError:
        return ""


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
