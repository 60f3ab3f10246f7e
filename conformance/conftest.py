"""Makes ``pytest conformance --impl NAME`` work in a checkout, installed or not."""

pytest_plugins = ["witcert_conformance.plugin"]
