// Package identity reads the certificates by which a program and a server know each other.
package identity

import (
	"crypto/tls"
	"crypto/x509"
	"os"
)

// Config returns the configuration of a client. ca: the authority's certificate; cert and key: the client's.
func Config(ca, cert, key string) (*tls.Config, error) {
	authority, err := os.ReadFile(ca)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(authority)
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		return nil, err
	}
	return &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{pair}}, nil
}
