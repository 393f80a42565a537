"""The sandbox that plug-ins share: set by the configuration, started by whoever opens it."""

from pathlib import Path

from condensegrpo.assembly.assemble import components
from condensegrpo.config.schema import load_config
from condensegrpo.sandbox.current import configure, current
from condensegrpo.sandbox.limits import MIB, Limits

CONFIG = "model: {path: nowhere}\ntask: {name: ledger}\n"


def test_a_configuration_says_what_the_shared_sandbox_is(tmp_path: Path) -> None:
    path = tmp_path / "demo.yaml"
    path.write_text(f"{CONFIG}sandbox: {{seconds: 2.5, memory_mib: 128, processes: 3, disk_mib: 4, files: 9}}\n")
    try:
        components(load_config(path))
        wanted = Limits(seconds=2.5, memory=128 * MIB, processes=3, disk=4 * MIB, file=2 * MIB, files=9, output=65536)
        assert current().limits == wanted
        assert current() is current()
    finally:
        configure(rung="auto", limits=Limits(), parallel=None, packages=())


def test_the_defaults_of_the_configuration_are_those_of_the_sandbox(tmp_path: Path) -> None:
    before = current()
    path = tmp_path / "demo.yaml"
    path.write_text(CONFIG)
    components(load_config(path))
    assert current() is before
    assert current().limits == Limits()
