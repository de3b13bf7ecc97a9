"""Whose a request is."""

import pytest

from serve_table.tenants import COMMON, tenant_of

SALT = b"0123456789abcdef"
KEY = (b"authorization", b"Bearer sk-secret")
OWN = (b"x-rutter-tenant", b"team-a")


@pytest.mark.parametrize("spelled", [b"bearer sk-secret", b"BEARER  sk-secret ", b"Bearer sk-secret"])
def test_nobody_is_several_tenants_by_spelling(spelled: bytes) -> None:
    assert tenant_of([(b"authorization", spelled)], SALT, False) == tenant_of([KEY], SALT, False)


def test_the_key_names_the_tenant_but_is_not_kept() -> None:
    tenant = tenant_of([KEY], SALT, by_own_header=False)
    assert tenant == tenant_of([(b"accept", b"*/*"), KEY], SALT, by_own_header=False)
    assert tenant != tenant_of([(b"authorization", b"Bearer sk-other")], SALT, by_own_header=False)
    assert tenant != tenant_of([KEY], b"another salt", by_own_header=False)
    assert (len(tenant), b"secret" in tenant) == (8, False)


def test_the_operators_header_counts_only_where_it_is_believed() -> None:
    assert tenant_of([KEY, OWN], SALT, by_own_header=False) == tenant_of([KEY], SALT, by_own_header=True)
    assert tenant_of([KEY, OWN], SALT, by_own_header=True) == tenant_of([OWN], SALT, by_own_header=True)
    assert tenant_of([OWN], SALT, by_own_header=False) == tenant_of([], SALT, by_own_header=True) == COMMON
