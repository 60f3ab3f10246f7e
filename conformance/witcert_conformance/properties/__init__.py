"""The properties, a module a contract. Every module is found by :func:`witcert_conformance.registry.properties`."""
