import pytest

from bitmtp_tvm import device
from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.targets import AARCH64, ORIN_HOST


def test_the_host_has_memory() -> None:
    facts = device.read_host()
    assert facts.compute_capability is None and 0 < facts.free <= facts.total


def test_cpu_features_are_those_of_every_core(monkeypatch) -> None:
    monkeypatch.setattr(device.platform, "machine", lambda: "x86_64")
    text = "processor\t: 0\nflags\t\t: fpu avx2 fma\n\nprocessor\t: 1\nflags\t\t: fpu avx2\n"
    monkeypatch.setattr(device, "Path", lambda _: FakeFile(text))
    assert device.cpu_features() == {"fpu", "avx2"}
    monkeypatch.setattr(device, "Path", lambda _: FakeFile("model: none\n"))
    assert device.cpu_features() == set()


def test_aarch64_features_come_from_the_kernels_own_list(monkeypatch) -> None:
    """Not from /proc/cpuinfo, which shows an emulator's host."""
    monkeypatch.setattr(device.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(device, "Path", lambda _: FakeFile("flags\t\t: avx2\n"))
    # fp, asimd and crc32 of an older processor, then the dot product and the atomics as well.
    monkeypatch.setattr(device, "_getauxval", lambda _: 0x83)
    assert device.cpu_features() == {"asimd"}
    monkeypatch.setattr(device, "_getauxval", lambda _: 0x100183)
    assert device.cpu_features() == {"asimd", "asimddp", "atomics"}


def test_every_feature_that_an_aarch64_host_asks_for_is_known() -> None:
    assert set(AARCH64.features) | set(ORIN_HOST.features) <= set(device._HWCAP_BITS)


class FakeFile:
    def __init__(self, text: str) -> None:
        self.text = text

    def read_text(self) -> str:
        return self.text


class Driver:
    """A libcuda whose functions write what a given device would."""

    def __init__(self, count: int = 1, status: int = 0, free: int = 1 << 20) -> None:
        self.attributes = {75: 8, 76: 7, 18: 1}
        self.count, self.status, self.free = count, status, free

    def __getattr__(self, name: str):
        return getattr(type(self), f"do_{name}", lambda *_: 0).__get__(self)

    def do_cuInit(self, _flags) -> int:
        return self.status

    def do_cuDriverGetVersion(self, out) -> int:
        out._obj.value = 12060
        return 0

    def do_cuDeviceGetCount(self, out) -> int:
        out._obj.value = self.count
        return 0

    def do_cuDeviceGetName(self, out, _size, _device) -> int:
        out.value = b"Orin"
        return 0

    def do_cuDeviceGetAttribute(self, out, attribute, _device) -> int:
        out._obj.value = self.attributes[attribute]
        return 0

    def do_cuMemGetInfo_v2(self, free, total) -> int:
        free._obj.value, total._obj.value = self.free, 8 << 30
        return 0

    def do_cuDevicePrimaryCtxRetain(self, _out, _device) -> int:
        return 0


@pytest.fixture
def driver(monkeypatch):
    def install(fake: Driver) -> None:
        monkeypatch.setattr(device, "load_libcuda", lambda: None)
        monkeypatch.setattr(device.ctypes, "CDLL", lambda _: fake)

    return install


def test_a_device_is_read_through_the_driver(driver) -> None:
    driver(Driver())
    facts = device.read_device()
    assert (facts.compute_capability, facts.driver, facts.name) == ((8, 7), 12060, "Orin")
    assert (facts.total, facts.cudart) == (8 << 30, 13)
    # On a board that shares its memory, what the page cache would give back counts as free.
    assert facts.free > 1 << 20


@pytest.mark.parametrize(
    ("fake", "index", "message"),
    [
        (Driver(status=100), 0, r"no usable NVIDIA GPU .*cuInit says 100"),
        (Driver(count=0), 0, "no GPU 0: this machine shows 0"),
        (Driver(count=1), 1, "no GPU 1: this machine shows 1"),
    ],
)
def test_no_device(driver, fake: Driver, index: int, message: str) -> None:
    driver(fake)
    with pytest.raises(BitMTPError, match=message):
        device.read_device(index)
