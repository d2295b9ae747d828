"""The free memory of a container."""

from pathlib import Path

from lightning_paral.model import host_memory_check


def test_free_memory_of_a_container_counts_what_the_kernel_can_reclaim(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 300\nfile 600\ninactive_anon 20\ninactive_file 550\nactive_file 50\n")
    assert host_memory_check._free_in_container(tmp_path) == 650

    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory_check._free_in_container(tmp_path) is None
