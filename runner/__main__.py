from runner.commands.start import main

raise SystemExit(main())
