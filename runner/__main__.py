from runner.cli.start import main

raise SystemExit(main())
