module fenka-go-purego-client

go 1.20

require github.com/ebitengine/purego v0.8.2
