{{- define "headrace.valkeyConfig" -}}
include /etc/valkey-password/valkey.conf
dir /data
appendonly yes
save ""
maxmemory-policy noeviction
{{- if .Values.tls.enabled }}
port 0
tls-port 6379
tls-cert-file /etc/valkey-tls/tls.crt
tls-key-file /etc/valkey-tls/tls.key
tls-ca-cert-file /etc/valkey-tls/ca.crt
tls-auth-clients no
{{- else }}
port 6379
{{- end }}
{{- end }}
