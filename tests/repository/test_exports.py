"""What `import kvferry` offers."""

import kvferry


def test_exported_names() -> None:
    assert sorted(kvferry.__all__) == [
        "AsyncClient",
        "Blocks",
        "Cache",
        "Client",
        "Costs",
        "Directory",
        "EmbeddedServer",
        "EngineGeometry",
        "EngineSession",
        "EngineSpec",
        "EngineToken",
        "Group",
        "GroupKind",
        "IntegrityOptions",
        "Interval",
        "KvferryError",
        "Listed",
        "Listing",
        "MemoryKind",
        "MemoryRegion",
        "NixlOptions",
        "PathRule",
        "Plane",
        "Publication",
        "RankGeometry",
        "Read",
        "ReadPlan",
        "ReadProgress",
        "ReadResult",
        "ReadState",
        "ReadSummary",
        "Release",
        "ReleaseOutcome",
        "ServerSettings",
        "StagingOptions",
        "TlsConfig",
        "TokenShard",
        "Verification",
        "__version__",
        "diff",
        "open_directory",
        "plan_read",
        "router_reference",
        "serve",
    ]


def test_every_exported_name_is_there_and_documented() -> None:
    for name in kvferry.__all__:
        value = getattr(kvferry, name)
        assert name == "__version__" or value.__doc__
        assert name in dir(kvferry)


def test_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(kvferry, "no_such_name")
