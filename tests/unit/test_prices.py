"""Price lists: what is read, what is refused with its line, and what instance types become of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from echo_planes.errors import ConfigError, DataError
from echo_planes.fleet import prices
from echo_planes.fleet.instance_types import InstanceType
from echo_planes.fleet.prices import (
    COLUMNS,
    PriceRow,
    convert_skypilot,
    instance_types_from_prices,
    read_prices,
)
from echo_planes.fleet.sku_facts import SKU_FACTS

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "configs" / "prices" / "example.csv"
DATA = Path(os.environ.get("ECHO_PLANES_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
REAL = DATA / "gpu_prices" / "gpu_prices.csv"
HEADER = ",".join(COLUMNS)


def write(folder: Path, *rows: str, header: str = HEADER) -> Path:
    path = folder / "prices.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        read_prices(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def instance_types(
    rows: tuple[PriceRow, ...],
    *,
    max_counts: Mapping[str, int] | None = None,
    min_counts: Mapping[str, int] | None = None,
) -> dict[str, InstanceType]:
    made = instance_types_from_prices(
        rows,
        lambda row: None if row.sku == "L4" else 2.0,
        max_count=5,
        max_counts=max_counts or {},
        min_counts=min_counts or {},
        spot_interruptions_per_hour=0.25,
    )
    return {instance_type.name: instance_type for instance_type in made}


# --- reading -------------------------------------------------------------------------------------


def test_a_row_is_read_as_it_is_written(tmp_path: Path) -> None:
    (row,) = read_prices(write(tmp_path, "cloud,H100,8,128,1600,81920,north,20.5,8.25,abc"))
    assert row == PriceRow(2, "cloud", "H100", 8, 128.0, 1600.0, 81920.0, "north", 20.5, 8.25, "abc")
    assert row.gpu_mem_gib == 80.0


def test_memory_that_a_list_leaves_out_is_the_makers(tmp_path: Path) -> None:
    known, unknown = read_prices(write(tmp_path, "c,L40S,1,,,,r,1,,", "c,Odd,1,,,,r,1,,"))
    assert known.gpu_mem_gib == SKU_FACTS["L40S"].memory_gib
    assert unknown.gpu_mem_gib is None


def test_the_example_is_a_list_and_says_that_it_is_made_up() -> None:
    rows = read_prices(EXAMPLE)
    assert {row.sku for row in rows} <= SKU_FACTS.keys()
    assert {row.catalog_commit for row in rows} == {"made-up"}


@pytest.mark.skipif(not REAL.is_file(), reason=f"{REAL} is not there: set ECHO_PLANES_DATA")
def test_the_real_list_is_read_whole() -> None:
    rows = read_prices(REAL)
    assert len(rows) == len(REAL.read_text().splitlines()) - 1
    assert {row.sku for row in rows} <= SKU_FACTS.keys()
    (row,) = (r for r in rows if (r.provider, r.sku, r.gpus) == ("verda", "H100", 1))
    assert (row.usd_per_hour, row.spot_usd_per_hour) == (2.29, 0.8015)


@pytest.mark.parametrize("column", ["usd_per_hour", "spot_usd_per_hour"])
@pytest.mark.parametrize(
    "price", ["0", "0.0", "-1", "nan", "inf", "-inf", "$2", "1,5", "1_200.5", "\uff11.5"]
)
def test_a_price_that_is_none_is_refused_with_its_line(tmp_path: Path, column: str, price: str) -> None:
    cells = dict.fromkeys(COLUMNS, "1") | {column: f'"{price}"'}
    message = refusal(write(tmp_path, "c,A100,1,,,,r,1,,", ",".join(cells.values())))
    assert ":3: " in message
    assert f"{column}={price}" in message
    assert ("fleet.workers" in message) == (float(price) == 0 if price in ("0", "0.0") else False)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("c,H100,1,,,,r,,,", "H100 has no price at all"),
        (",H100,1,,,,r,1,,", "provider is empty"),
        ("c,,1,,,,r,1,,", "sku is empty"),
        ("c,H100,0,,,,r,1,,", "gpus=0"),
        ("c,H100,1.5,,,,r,1,,", "gpus=1.5"),
        ("c,H100,1,,,-3,r,1,,", "gpu_mem_mib=-3"),
        ("c,H100,1,,,,r,1", "8 fields, but the header has 10"),
        ('c,"H100,1,,,,r,1,,', "not CSV"),
    ],
)
def test_a_wrong_row_is_refused_with_its_line(tmp_path: Path, row: str, said: str) -> None:
    message = refusal(write(tmp_path, "c,A100,1,,,,r,1,,", row))
    assert "prices.csv:3: " in message
    assert said in message


def test_columns_must_be_the_known_ones(tmp_path: Path) -> None:
    wrong = HEADER.replace("spot_usd_per_hour", "spot_usd_hour")
    assert "'spot_usd_hour' is unknown; did you mean 'spot_usd_per_hour'?" in refusal(
        write(tmp_path, header=wrong)
    )
    assert "no column usd_per_hour" in refusal(
        write(tmp_path, header="provider,sku,gpus,region,spot_usd_per_hour")
    )
    assert "'sku' is there twice" in refusal(write(tmp_path, header=HEADER + ",sku"))


def test_one_kind_of_machine_has_one_row(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, "c,H100,1,8,,,r,1,,", "c,H100,1,16,,,r,2,,"))
    assert "prices.csv:3: c H100 1 r has its prices in line 2" in message


def test_a_file_that_is_no_list_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cannot be read" in refusal(tmp_path / "none.csv")
    assert "no rows" in refusal(write(tmp_path))
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in refusal(binary)
    monkeypatch.setattr(prices, "MAX_FILE_BYTES", 10)
    assert "it has more than" in refusal(write(tmp_path))


# --- instance types --------------------------------------------------------------------------------------


def test_each_price_is_an_instance_type_and_a_row_without_one_has_none(tmp_path: Path) -> None:
    rows = read_prices(
        write(tmp_path, "c,H100,1,,,,r,4,1,", "c,A100,2,,,,r,3,,", "d,A100,1,,,,r,,0.5,", "c,L4,1,,,,r,1,,")
    )
    made = instance_types(rows)
    assert set(made) == {"c/r/H100/on_demand", "c/r/H100/spot", "c/r/A100x2/on_demand", "d/r/A100/spot"}
    spot = made["c/r/H100/spot"]
    assert (spot.usd_per_hour, spot.market, spot.interruptions_per_hour, spot.region) == (
        1.0,
        "spot",
        0.25,
        "c/r",
    )
    steady = made["c/r/H100/on_demand"]
    assert (steady.usd_per_hour, steady.interruptions_per_hour, steady.rho) == (4.0, 0.0, 2.0)


def test_quotas_name_an_instance_type_or_a_sku_and_minimums_an_instance_type(tmp_path: Path) -> None:
    rows = read_prices(write(tmp_path, "c,H100,1,,,,r,4,1,", "c,A100,1,,,,r,3,,"))
    made = instance_types(
        rows, max_counts={"H100": 2, "c/r/H100/spot": 9}, min_counts={"c/r/A100/on_demand": 3}
    )
    assert {name: (o.min_count, o.max_count) for name, o in made.items()} == {
        "c/r/H100/on_demand": (0, 2),
        "c/r/H100/spot": (0, 9),
        "c/r/A100/on_demand": (3, 5),
    }


def test_a_quota_below_the_minimum_or_of_nothing_is_refused(tmp_path: Path) -> None:
    rows = read_prices(write(tmp_path, "c,H100,1,,,,r,4,1,"))
    name = "c/r/H100/spot"
    with pytest.raises(ConfigError, match=r"quota of c/r/H100/spot: 2 workers are fewer than its minimum 3"):
        instance_types(rows, max_counts={name: 2}, min_counts={name: 3})
    with pytest.raises(ConfigError, match=r"quota\.H10: .*did you mean 'H100'"):
        instance_types(rows, max_counts={"H10": 2})
    with pytest.raises(ConfigError, match=r"minimum\.c/r/H100/spt: .*did you mean 'c/r/H100/spot'"):
        instance_types(rows, min_counts={"c/r/H100/spt": 2})


# --- SkyPilot ------------------------------------------------------------------------------------

JSON_INFO = '"{""Gpus"": [{""Name"": ""H100"", ""MemoryInfo"": {""SizeInMiB"": 81559}}], ""Total"": 163118}"'
PYTHON_INFO = "\"{'Gpus': [{'Name': 'A6000', 'MemoryInfo': {'SizeInMiB': 49152}}]}\""
SKYPILOT = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice"


def test_a_catalogue_becomes_a_list_that_can_be_read(tmp_path: Path) -> None:
    source = tmp_path / "vms.csv"
    source.write_text(
        "\n".join(
            [
                SKYPILOT,
                f"2h,H100,2.0,32.0,370.5,6.78,east,{JSON_INFO},2.373",
                f"a6,A6000,1.0,14.0,100.0,1.09,east,{PYTHON_INFO},",
                "l4,L4,1.0,4.0,16.0,,east,,0.2",
                "cpu,,,4.0,16.0,0.2,east,,",
                "part,A10,0.167,6.0,55.0,0.45,east,,",
                ",H100,1.0,,,1.9,east,,0.5",  # the GPU alone
                "gone,L4,4.0,4.0,16.0,,east,,",
            ]
        )
    )
    converted = convert_skypilot(source, "cloud")
    assert (converted.num_rows, converted.without_gpu, converted.without_price) == (3, 2, 1)
    assert converted.without_machine == 1
    target = tmp_path / "prices.csv"
    target.write_text(converted.text)
    assert read_prices(target) == (
        PriceRow(2, "cloud", "H100", 2, 32.0, 370.5, 81559.0, "east", 6.78, 2.373, ""),
        PriceRow(3, "cloud", "A6000", 1, 14.0, 100.0, 49152.0, "east", 1.09, None, ""),
        PriceRow(4, "cloud", "L4", 1, 4.0, 16.0, 24576.0, "east", None, 0.2, ""),
    )


def test_of_zones_and_machine_types_the_cheapest_price_is_taken(tmp_path: Path) -> None:
    source = tmp_path / "vms.csv"
    source.write_text(
        "\n".join(
            [
                "InstanceType,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,GpuInfo,Region,AvailabilityZone,"
                "Price,SpotPrice,Arch",
                "big,32,64,H100,1,,east,a,3.0,0.9,x86",
                "small,16,64,H100,1,,east,b,2.5,1.2,x86",
                "small,16,64,H100,1,,west,a,2.6,,x86",
            ]
        )
    )
    converted = convert_skypilot(source, "cloud")
    assert (converted.num_rows, converted.dearer) == (2, 1)
    target = tmp_path / "prices.csv"
    target.write_text(converted.text)
    east, west = read_prices(target)
    assert (east.region, east.vcpus, east.usd_per_hour, east.spot_usd_per_hour) == ("east", 16.0, 2.5, 0.9)
    assert (west.region, west.usd_per_hour) == ("west", 2.6)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("provider,sku\nc,H100", "no column InstanceType"),
        (f"{SKYPILOT}\ncpu,,,4,16,0.2,east,,", "no GPU with a price"),
        (f"{SKYPILOT}\nh,H100,1,4,16,-0.2,east,,", ":2: Price=-0.2"),
        (f"{SKYPILOT}\nh,H100,one,4,16,2,east,,", ":2: AcceleratorCount=one"),
    ],
)
def test_a_catalogue_that_is_none_is_refused(tmp_path: Path, text: str, said: str) -> None:
    source = tmp_path / "vms.csv"
    source.write_text(text + "\n")
    with pytest.raises(DataError) as caught:
        convert_skypilot(source, "cloud")
    assert said in str(caught.value)
