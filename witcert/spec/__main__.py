"""`python -m witcert.spec`: the same as `witcert spec`."""

from witcert.spec.cli import app

app(prog_name="witcert spec")
