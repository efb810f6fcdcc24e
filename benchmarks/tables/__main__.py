"""Writes the tables of README.md and docs/ anew, of the files in benchmarks/results.

python -m benchmarks.tables
python -m benchmarks.tables --check    # writes nothing; fails if a page has another table
"""

import argparse

from benchmarks.tables import PAGES, Results, fill


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    results = Results()
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        if (new := fill(old, results)) != old:
            if check:
                raise SystemExit(f"{page} has other tables than `python -m benchmarks.tables` makes")
            page.write_text(new, encoding="utf-8")
            print(page)


if __name__ == "__main__":
    main()
