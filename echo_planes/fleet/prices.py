"""Price lists: read, check and convert them to instance types, and convert SkyPilot's catalogue to one.

A list is a CSV file with the columns `COLUMNS`. A wrong price is an error that names its line. The reader
never skips such a row, because a fleet chosen without it could cost more than necessary.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from echo_planes.config.files import read_text
from echo_planes.config.plain_yaml import plain_number
from echo_planes.errors import ConfigError, DataError, nearest
from echo_planes.fleet.instance_types import InstanceType
from echo_planes.fleet.sku_facts import SKU_FACTS
from echo_planes.types import Market

COLUMNS = (
    "provider",
    "sku",
    "gpus",
    "vcpus",
    "mem_gib",
    "gpu_mem_mib",
    "region",
    "usd_per_hour",
    "spot_usd_per_hour",
    "catalog_commit",
)
NEEDED = ("provider", "sku", "gpus", "region")
PRICES = ("usd_per_hour", "spot_usd_per_hour")
SKYPILOT_NEEDED = ("InstanceType", "AcceleratorName", "AcceleratorCount", "Price", "SpotPrice", "Region")
MAX_FILE_BYTES = 64 * 2**20
MAX_GPUS = 1024  # of one machine
# Memory of one GPU in the column GpuInfo, which is JSON in some catalogues and a Python literal in others.
_GPU_MIB = re.compile(r"""['"]SizeInMiB['"]\s*:\s*(\d{1,9})""")


@dataclass(frozen=True, slots=True)
class PriceRow:
    """Prices of one kind of machine in one region."""

    line: int  # in the file, from 1
    provider: str
    sku: str
    gpus: int
    vcpus: float | None
    mem_gib: float | None
    gpu_mem_mib: float | None  # per GPU
    region: str
    usd_per_hour: float | None  # of the whole machine; None: not offered on demand
    spot_usd_per_hour: float | None  # None: not offered as spot
    catalog_commit: str

    @property
    def gpu_mem_gib(self) -> float | None:
        """Memory of one GPU from the list, else from the data sheet; None if neither has it."""
        if self.gpu_mem_mib is not None:
            return self.gpu_mem_mib / 1024
        facts = SKU_FACTS.get(self.sku)
        return facts.memory_gib if facts else None


def read_prices(path: Path) -> tuple[PriceRow, ...]:
    """Read the rows of a price list, in the order of the file.

    Raises:
        DataError: a file that cannot be read, unknown or missing columns, a price that is zero, negative or
            no number, a row without any price, or two rows for the same kind of machine. Names file and line.
    """
    rows: list[PriceRow] = []
    seen: dict[tuple[str, str, int, str], int] = {}
    for number, fields in _records(path, (*NEEDED, *PRICES), COLUMNS):
        row = _row(path, number, fields)
        key = (row.provider, row.sku, row.gpus, row.region)
        if key in seen:
            raise DataError(
                f"{path}:{number}: {' '.join(map(str, key))} has its prices in line {seen[key]}; keep one"
            )
        seen[key] = number
        rows.append(row)
    if not rows:
        raise DataError(f"{path} has no rows below its header; give a list with prices")
    return tuple(rows)


def instance_types_from_prices(
    rows: Iterable[PriceRow],
    mu_of: Callable[[PriceRow], float | None],
    *,
    max_count: int,
    max_counts: Mapping[str, int],
    min_counts: Mapping[str, int],
    spot_interruptions_per_hour: float,
) -> tuple[InstanceType, ...]:
    """Return an instance type for each price of each row; a worker spans all GPUs of its machine.

    Args:
        rows: rows of one price list.
        mu_of: trajectories/s of a worker on that machine; None leaves the row out.
        max_count: quota of an instance type that `max_counts` does not name, workers.
        max_counts: quota by an instance type's name, or by a SKU for each of its instance types.
        min_counts: workers that the fleet always keeps, by an instance type's name.
        spot_interruptions_per_hour: expected interruptions an hour of a spot worker.

    Raises:
        ConfigError: a name that no instance type has, or a quota below the minimum.
    """
    instance_types = []
    for row in rows:
        mu = mu_of(row)
        if mu is None:
            continue
        prices: tuple[tuple[Market, float | None], ...] = (
            ("on_demand", row.usd_per_hour),
            ("spot", row.spot_usd_per_hour),
        )
        for market, usd_per_hour in prices:
            if usd_per_hour is not None:
                name = _instance_type_name(row, market)
                instance_types.append(
                    InstanceType(
                        name=name,
                        sku=row.sku,
                        usd_per_hour=usd_per_hour,
                        mu=mu,
                        max_count=max_counts.get(name, max_counts.get(row.sku, max_count)),
                        min_count=min_counts.get(name, 0),
                        region=f"{row.provider}/{row.region}",
                        market=market,
                        interruptions_per_hour=spot_interruptions_per_hour if market == "spot" else 0.0,
                    )
                )
    names = {instance_type.name for instance_type in instance_types}
    for setting, counts, known in (
        ("quota", max_counts, names | {instance_type.sku for instance_type in instance_types}),
        ("minimum", min_counts, names),
    ):
        for name in counts:
            if name not in known:
                raise ConfigError(
                    f"{setting}.{name}: no such instance type here{nearest(name, sorted(known))}"
                )
    for instance_type in instance_types:
        if instance_type.max_count < instance_type.min_count:
            raise ConfigError(
                f"quota of {instance_type.name}: {instance_type.max_count} workers are fewer than its "
                f"minimum {instance_type.min_count}; raise the quota or lower minimum.{instance_type.name}"
            )
    return tuple(instance_types)


def dear_spot(rows: Iterable[PriceRow]) -> tuple[str, ...]:
    """Return a sentence on every row whose spot price is above that on demand; a column may be mistaken."""
    return tuple(
        f"Spot is dearer than on demand: {row.provider}/{row.region}/{row.sku}, ${row.spot_usd_per_hour:g} "
        f"instead of ${row.usd_per_hour:g} an hour (line {row.line})."
        for row in rows
        if row.usd_per_hour and row.spot_usd_per_hour and row.spot_usd_per_hour > row.usd_per_hour
    )


def _instance_type_name(row: PriceRow, market: Market) -> str:
    machine = row.sku if row.gpus == 1 else f"{row.sku}x{row.gpus}"
    return f"{row.provider}/{row.region}/{machine}/{market}"


# --- SkyPilot ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Converted:
    """Catalogue as a price list, with the number of rows left out for each reason."""

    text: str  # CSV with the columns `COLUMNS`
    num_rows: int
    without_gpu: int  # no GPU, or a fraction of one
    without_machine: int  # price of the GPU alone; its machine has another row (GCP)
    without_price: int
    dearer: int  # merged with a row of the same SKU, number of GPUs and region: other zone or machine type


def convert_skypilot(path: Path, provider: str) -> Converted:
    """Convert a SkyPilot catalogue (vms.csv) to a price list.

    The list has the lowest price of each SKU, number of GPUs and region, on each market. A GPU that is priced
    without its machine is left out, because it would look cheaper than it is.

    Raises:
        DataError: a file that cannot be read, a missing column, or a wrong price or count. Names file
            and line.
    """
    best: dict[tuple[str, int, str], dict[str, str]] = {}
    without_gpu = without_machine = without_price = dearer = 0
    for number, fields in _records(path, SKYPILOT_NEEDED):
        gpus = _number(path, number, "AcceleratorCount", fields["AcceleratorCount"])
        if not fields["AcceleratorName"] or gpus is None or not gpus.is_integer():
            without_gpu += 1
            continue
        if not fields["InstanceType"]:
            without_machine += 1
            continue
        if not fields["Price"] and not fields["SpotPrice"]:
            without_price += 1
            continue
        row = _from_skypilot(path, number, fields, provider, int(gpus))
        key = (row["sku"], int(row["gpus"]), row["region"])
        if key in best:
            dearer += 1
            row = _cheaper(best[key], row)
        best[key] = row
    if not best:
        raise DataError(f"{path} has no GPU with a price; give a catalogue's vms.csv")
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(best.values())
    return Converted(out.getvalue(), len(best), without_gpu, without_machine, without_price, dearer)


def _from_skypilot(
    path: Path, number: int, fields: Mapping[str, str], provider: str, gpus: int
) -> dict[str, str]:
    sku = fields["AcceleratorName"]
    values = {
        name: _number(path, number, name, fields.get(name, ""))
        for name in ("vCPUs", "MemoryGiB", "Price", "SpotPrice")
    }
    told = _GPU_MIB.search(fields.get("GpuInfo", ""))
    facts = SKU_FACTS.get(sku)
    memory_mib = float(told.group(1)) if told else facts.memory_gib * 1024 if facts else None

    def text(value: float | None) -> str:
        return "" if value is None else f"{value:.10g}"

    return {
        "provider": provider,
        "sku": sku,
        "gpus": str(gpus),
        "vcpus": text(values["vCPUs"]),
        "mem_gib": text(values["MemoryGiB"]),
        "gpu_mem_mib": text(memory_mib),
        "region": fields["Region"] or "any",
        "usd_per_hour": text(values["Price"]),
        "spot_usd_per_hour": text(values["SpotPrice"]),
        "catalog_commit": "",
    }


def _cheaper(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
    """Merge two rows: the lower price of each market, the rest from the machine cheaper on demand."""

    def price(row: Mapping[str, str], column: str) -> float:
        return float(row[column]) if row[column] else math.inf

    machine = min((one, other), key=lambda row: (price(row, PRICES[0]), price(row, PRICES[1])))
    lowest = {column: min((one, other), key=lambda row: price(row, column))[column] for column in PRICES}
    return {**machine, **lowest}


# --- reading -------------------------------------------------------------------------------------


def _records(
    path: Path, needed: Sequence[str], allowed: Sequence[str] | None = None
) -> list[tuple[int, dict[str, str]]]:
    """Read a CSV file as (line number, column -> text); `allowed`: columns it may have, None for any."""
    text = read_text(path, MAX_FILE_BYTES, advice="give a CSV file of prices")
    reader = csv.reader(io.StringIO(text), strict=True)
    records: list[tuple[int, dict[str, str]]] = []
    try:
        header = next(reader, [])
        _check_header(path, header, needed, allowed or header)
        for record in reader:
            if len(record) == len(header):
                records.append(
                    (reader.line_num, dict(zip(header, (field.strip() for field in record), strict=True)))
                )
            elif record:
                raise DataError(
                    f"{path}:{reader.line_num}: {len(record)} fields, but the header has {len(header)}; "
                    "mend the line"
                )
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: not CSV ({error}); mend the line") from error
    return records


def _check_header(path: Path, header: Sequence[str], needed: Sequence[str], allowed: Sequence[str]) -> None:
    for name in header:
        if name not in allowed:
            hint = nearest(name, allowed) or f"; allowed: {', '.join(allowed)}"
            raise DataError(f"{path}: column '{name}' is unknown{hint}")
        if header.count(name) > 1:
            raise DataError(f"{path}: column '{name}' is there twice; keep one")
    missing = [name for name in needed if name not in header]
    if missing:
        raise DataError(f"{path}: no column {', '.join(missing)}; the first line must name the columns")


def _row(path: Path, line: int, fields: Mapping[str, str]) -> PriceRow:
    for name in NEEDED:
        if not fields[name]:
            raise DataError(f"{path}:{line}: {name} is empty; fill it in")
    gpus = _number(path, line, "gpus", fields["gpus"])
    if gpus is None or not gpus.is_integer() or gpus > MAX_GPUS:
        raise DataError(f"{path}:{line}: gpus={fields['gpus']} is not a number of GPUs; mend it")
    values = {
        name: _number(path, line, name, fields.get(name, ""))
        for name in ("vcpus", "mem_gib", "gpu_mem_mib", *PRICES)
    }
    if values["usd_per_hour"] is None and values["spot_usd_per_hour"] is None:
        raise DataError(f"{path}:{line}: {fields['sku']} has no price at all; give one, or take the row out")
    return PriceRow(
        line=line,
        provider=fields["provider"],
        sku=fields["sku"],
        gpus=int(gpus),
        region=fields["region"],
        catalog_commit=fields.get("catalog_commit", ""),
        **values,
    )


def _number(path: Path, line: int, name: str, text: str) -> float | None:
    """Parse a number above 0; None for an empty field."""
    if not text:
        return None
    value = plain_number(text)
    if math.isfinite(value) and value > 0:
        return value
    if value == 0 and name in PRICES:
        raise DataError(
            f"{path}:{line}: {name}={text}: nothing is for hire at $0; take the row out (a machine of your "
            "own belongs into fleet.workers, with usd_per_hour: 0.0)"
        )
    raise DataError(f"{path}:{line}: {name}={text} is not a number above 0; mend it, or leave it empty")
